"""Selects attention layers by their paths, and assigns maps and options to them.

All arguments that name layers use this file: `include`, `exclude`, `Plan`, and dicts of
`softmax_heads`.
"""

from dataclasses import dataclass, replace
from fnmatch import fnmatch

from keras_rfattn.feature_maps import DEFAULT, resolve
from keras_rfattn.layers.softmax_heads import check_softmax_heads
from keras_rfattn.ops.options import Options


@dataclass(frozen=True)
class Plan:
    """Assignment of feature maps and options to attention layers.

    Attributes:
        maps: Dict from a layer's path, or a pattern (`fnmatch`), to one of these:

            - a feature map in any form that `replace_attention` accepts
            - `None`, to keep softmax
            - an `ops.Options`, for the map that a later pattern gives the layer, or
              else `feature_maps.DEFAULT`
            - a pair `(feature map, Options)`

            If several patterns match a layer, the first one counts. A layer that no
            pattern matches keeps softmax. `Options` of a plan stand in place of those
            in the call of `replace_attention`.

    Examples:
        >>> inputs = keras.Input((8, 16))
        >>> outputs = keras.layers.MultiHeadAttention(2, 8)(inputs, inputs)
        >>> model = keras.Model(inputs, outputs)
        >>> options = keras_rfattn.ops.Options(softmax_heads=[1])
        >>> plan = keras_rfattn.models.Plan({"multi_head_*": ("favorplus", options)})
        >>> model = keras_rfattn.replace_attention(model, plan)
        >>> row = keras_rfattn.describe_attention(model).rows[0]
        >>> row.mechanism, row.note
        ('favorplus', '1 of 2 key/value heads softmax (1)')
    """

    maps: dict

    def __post_init__(self):
        is_dict = isinstance(self.maps, dict) and self.maps
        if not is_dict or not all(isinstance(path, str) for path in self.maps):
            raise ValueError(
                "`maps` must be a dict from layer paths or patterns, as strings, to "
                f"feature maps. Received: maps={self.maps!r}."
            )
        for path, value in self.maps.items():
            pair = _pair(value)
            if len(pair) != 2 or not isinstance(pair[1], (Options, type(None))):
                raise TypeError(
                    "`maps` must have pairs `(feature map, keras_rfattn.ops.Options)`. "
                    f"Received: {value!r:.200} for {path!r}."
                )
            if pair[0] is not None:
                # It raises errors; a seed leaves Keras' global one as it is.
                resolve(pair[0], seed=0)


def assign(feature_map, options, sites):
    """Returns triples of sites, the feature map for them, and their options."""
    if not isinstance(feature_map, Plan):
        return [(sites, feature_map, options)]
    found = lookup("maps", feature_map.maps, sites)
    changes = []
    for site in sites:
        values = found.get(site.index, [None])
        if values[0] is not None:
            pairs = [_pair(value) for value in values]
            identifier = next((x for x, _ in pairs if x is not None), DEFAULT)
            changes.append(([site], identifier, pairs[0][1] or options))
    if not changes:
        raise ValueError(
            "`feature_map` must replace at least one layer. Received: a plan that "
            f"keeps every layer softmax, {feature_map}."
        )
    return changes


def by_heads(argument, heads, sites):
    """Returns sites of which all heads stay softmax, and pairs of site and options."""
    # Heads that are softmax already stay so.
    whole, partial = [], []
    found = lookup(argument, heads, sites)
    for site in [x for x in sites if x.index in found]:
        options = site.layer.options if site.is_linear else Options()
        named = Options(softmax_heads=found[site.index][0]).softmax_heads
        kept = tuple(sorted({*named, *options.softmax_heads}))
        count, _ = site.linear_class._kv_shape(site.layer)
        if kept == tuple(range(count)):
            whole.append(site)
        else:
            check_softmax_heads(kept, count, site.path)
            partial.append((site, replace(options, softmax_heads=kept)))
    return whole, partial


def _pair(value):
    """Returns the feature map and the options in a value, `None` for what it lacks."""
    if isinstance(value, Options):
        return None, value
    return value if isinstance(value, tuple) else (value, None)


def lookup(argument, values, sites):
    """Returns the values whose patterns match each layer, as a dict from indices."""
    found = {}
    for pattern, value in values.items():
        # A path may contain characters that are special in patterns.
        hits = [x for x in sites if x.path == pattern or fnmatch(x.path, pattern)]
        if not hits:
            paths = "\n".join(f"  {site.path}" for site in sites)
            raise ValueError(
                f"`{argument}` must have paths or patterns of attention layers. "
                f"Received: {pattern!r}, which matches none. Use some of:\n{paths}"
            )
        for site in hits:
            found.setdefault(site.index, []).append(value)
    return found


def select(sites, include, exclude):
    """Selects the sites that `include` matches and `exclude` does not."""
    indices = {site.index for site in sites}
    if include is not None:
        indices &= _chosen("include", include, sites)
    if exclude is not None:
        indices -= _chosen("exclude", exclude, sites)
    return [site for site in sites if site.index in indices]


def _chosen(argument, choice, sites):
    """Returns the indices of the sites that `include` or `exclude` matches."""
    patterns = [choice] if isinstance(choice, str) else choice
    is_list = isinstance(patterns, (list, tuple, set))
    if not is_list or not all(isinstance(x, str) for x in patterns):
        raise TypeError(
            f"`{argument}` must be a layer path or pattern, or a list of those, as in "
            f"the rows of `describe_attention`. Received: {argument}={choice!r}."
        )
    return set(lookup(argument, dict.fromkeys(patterns), sites))

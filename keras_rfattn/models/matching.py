"""Selects attention layers by their paths, and assigns feature maps to them.

All arguments that name layers use this file: `include`, `exclude`, `softmax_heads` and
the maps of a `Plan`.
"""

import fnmatch
import inspect
from dataclasses import dataclass

from keras_rfattn.arguments import check_seed
from keras_rfattn.feature_maps.registry import check_identifier


@dataclass(frozen=True)
class Plan:
    """Assignment of feature maps to attention layers.

    Attributes:
        maps: Dict from a layer's path, or a pattern (`fnmatch`), to a feature map in
            any form that `replace_attention` accepts, or to `None` to keep softmax. If
            several patterns match a layer, the first one counts. A layer that no
            pattern matches keeps softmax.

    Raises:
        ValueError: If `maps` is not a dict with string keys, is empty, or names an
            unknown feature map.
        TypeError: If `replace_attention` does not accept the type of a value.

    Examples:
        >>> inputs = keras.Input((8, 16))
        >>> outputs = keras.layers.MultiHeadAttention(2, 8)(inputs, inputs)
        >>> model = keras.Model(inputs, outputs)
        >>> plan = keras_rfattn.models.Plan({"multi_head_*": "favorplus"})
        >>> model = keras_rfattn.replace_attention(model, plan)
        >>> keras_rfattn.describe_attention(model).rows[0].mechanism
        'favorplus'
    """

    maps: dict

    def __post_init__(self):
        if not isinstance(self.maps, dict) or not self.maps:
            raise ValueError(
                "`maps` must be a dict that maps layer paths to feature maps. "
                f"Received: maps={self.maps!r}."
            )
        for path, feature_map in self.maps.items():
            if not isinstance(path, str):
                raise ValueError(
                    "`maps` must be a dict whose keys are layer paths, as strings. "
                    f"Received: the key {path!r} of type {type(path).__name__}."
                )
            if feature_map is not None:
                check_identifier(feature_map)


def check_mechanism(feature_map, num_features=None, seed=None):
    """Raises the errors of `check_identifier`; of a plan, it checks only the seed."""
    if isinstance(feature_map, Plan):
        check_seed(seed)
    else:
        check_identifier(feature_map, num_features, seed)


def lookup(argument, values, sites):
    """Finds the value that a dict of patterns assigns to each attention layer."""
    found = {}
    for pattern, value in values.items():
        # A path may contain characters that are special in patterns.
        hits = [
            site
            for site in sites
            if site.path == pattern
            or (isinstance(pattern, str) and fnmatch.fnmatch(site.path, pattern))
        ]
        if not hits:
            paths = "\n".join(f"  {site.path}" for site in sites)
            raise ValueError(
                f"`{argument}` must have paths or patterns of attention layers. "
                f"Received: {pattern!r}, which matches none. Use some of:\n{paths}"
            )
        for site in hits:
            found.setdefault(site.index, value)
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
    if callable(choice):
        _check_takes_two(argument, choice)
        return {site.index for site in sites if choice(site.path, site.layer)}
    patterns = [choice] if isinstance(choice, str) else choice
    if not isinstance(patterns, (list, tuple, set)) or not all(
        isinstance(pattern, str) for pattern in patterns
    ):
        raise TypeError(
            f"`{argument}` must be a layer path or pattern, a list of those, or a "
            f"callable `(path, layer) -> bool`. Received: {argument}={choice!r}."
        )
    return set(lookup(argument, dict.fromkeys(patterns), sites))


def _check_takes_two(argument, function):
    try:
        inspect.signature(function).bind("path", None)
    except TypeError as error:
        raise TypeError(
            f"`{argument}` must be a callable `(path, layer) -> bool`. "
            f"Received: {argument}={function!r}, which does not take both ({error})."
        ) from None
    except ValueError:
        # Some functions written in C have no signature to check.
        pass

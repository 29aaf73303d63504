"""Replaces softmax attention by linear attention inside the existing layers.

All checks run, and all new weights are built, before the first layer changes. `swap`
changes a single layer; `saving` changes the containers that hold it.
"""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import keras

import keras_rfattn.models.saving as saving
import keras_rfattn.models.swap as swap
from keras_rfattn import feature_maps
from keras_rfattn.feature_maps.arguments import check_flag, check_seed, derive_seed
from keras_rfattn.layers.checks import check_model, num_heads, title
from keras_rfattn.layers.implementation import check_options
from keras_rfattn.layers.linear_attention import LinearAttention
from keras_rfattn.layers.self_attention import kinds_in_graph
from keras_rfattn.layers.softmax_heads import check_softmax_heads
from keras_rfattn.models.matching import Plan, lookup, select
from keras_rfattn.models.report import local_note
from keras_rfattn.models.survey import has_prefix, is_pooling, survey
from keras_rfattn.ops.options import Options


def replace_attention(
    model: keras.layers.Layer,
    feature_map: Any = "favorpp_learned",
    *,
    num_features: int | None = None,
    include: str | list | Callable | None = None,
    exclude: str | list | Callable | None = None,
    seed: int | None = None,
    block_size: int | None = None,
    window: int | None = None,
    sliding: bool = False,
    max_segments: int | None = None,
    temperature: float | None = None,
    implementation: str = "auto",
    softmax_heads: dict | None = None,
    drop_sliding_window: bool = False,
    drop_soft_cap: bool = False,
    sinks: int = 0,
) -> keras.layers.Layer:
    """Makes the attention of a model linear in sequence length, in place.

    Every pretrained weight is kept as the same variable with the same name. If the
    model was trained, its optimizer keeps the slots of these weights, and gets slots
    for those of the maps. `describe_attention(model)` reports what was replaced, and
    `restore_attention(model)` restores softmax attention.

    Layers are judged one by one. A layer with a sliding window (Gemma 2 and 3, GPT-OSS)
    is linear in length already. It keeps its softmax, and the layers beside it that see
    all tokens are replaced.

    Args:
        model: A built Keras model or layer: a KerasHub backbone or task, a KerasCV
            layer, or any model with `keras.layers.MultiHeadAttention` or
            `keras.layers.GroupQueryAttention` inside.
        feature_map: Name of a mechanism (`keras_rfattn.feature_maps.list()`), a
            `FeatureMap`, or its config. Each layer gets its own copy. A `models.Plan`
            assigns a map to each layer, or keeps the layer softmax.
        num_features: Number of random vectors per head, for a map given by name.
            `None` uses the map's default, which is twice the head dim for most maps.
        include: Layers to replace: a path or pattern (`fnmatch`), a list of these, or
            a callable `(path, layer) -> bool`. `None` selects all layers except those
            that pool with a single query, where softmax is already linear.
        exclude: Layers to keep softmax, in the same forms as `include`. `None`
            excludes no layer.
        seed: Seed of the random vectors, from which each layer derives its own seed.
            `None` uses the seed of the feature map.
        block_size: Number of tokens per block in causal attention. `None` uses a
            default for the device. The result does not depend on it.
        window: Number of tokens per window. The sequence is cut into windows, and
            attention within a window is exact; the feature map covers the tokens
            outside. Needs a map whose kernel is softmax or polynomial. `None` uses
            the feature map for all tokens.
        sliding: Whether attention to the preceding window (and, without a causal
            mask, to the following one) is exact too.
        max_segments: Maximum number of texts packed into one row. Compiled functions
            need it for `segment_ids`; see `layers.MultiHeadAttention.call`.
        temperature: Positive number or `None`. If set, queries and keys are
            normalized to unit length, and their cosine is divided by this number. The
            map then estimates softmax attention of normalized vectors, which differs
            from the checkpoint's attention. The hybrid maps are made for this.
        implementation: `"auto"`, the fastest that has been timed; `"xla"`, ordinary
            operations of the backend; or kernels of `keras_rfattn.experimental` for
            maps whose features are exponentials: `"pallas"` (TPUs, JAX) or `"triton"`
            (NVIDIA GPUs, PyTorch).
        softmax_heads: Dict from a layer path or pattern (as in `models.Plan`) to the
            query heads, counted from 0, that stay softmax in this layer. These should
            be heads that compare tokens; `diagnostics.sensitivity(heads=True)` finds
            them. Their time and memory stay quadratic in sequence length.
        drop_sliding_window: Whether to replace layers with a sliding window too. They
            see only the last tokens; the linear attention in their place sees all
            tokens. If every layer has a window (Mistral), there is nothing else to
            replace.
        drop_soft_cap: Whether to replace layers with a soft cap on their logits (Gemma
            2), which linear attention ignores. `uptrain` and `diagnostics` still
            compare with the capped softmax of the checkpoint.
        sinks: Number of first tokens of a row, counted from its first visible token,
            that all later queries weigh exactly, beside the window. Pretrained decoders
            often put a large share of their attention on the first tokens, so 4 is a
            good choice for them. Needs a `window`.

    Returns:
        The model.

    Raises:
        TypeError: If `model` is not a Keras layer.
        ValueError: If an argument is invalid, the model has no attention, all selected
            layers are local, or one of them has attention that linear attention cannot
            express, or a built optimizer cannot train the new weights. The model is
            unchanged in that case.

    Examples:
        >>> inputs = keras.Input((8, 16))
        >>> outputs = keras.layers.MultiHeadAttention(2, 8)(inputs, inputs)
        >>> model = keras.Model(inputs, outputs)
        >>> model = keras_rfattn.replace_attention(model, "favorplus", num_features=32)
        >>> report = keras_rfattn.describe_attention(model)
        >>> report.rows[0].mechanism, report.rows[0].width
        ('favorplus', 32)
    """
    check_model(model)
    check_flag("drop_sliding_window", drop_sliding_window)
    check_flag("drop_soft_cap", drop_soft_cap)
    options = Options(
        block_size, window, sliding, max_segments, temperature, implementation,
        sinks=sinks,
    )  # fmt: skip
    sites = survey(model, drop_sliding_window, drop_soft_cap)
    selected = _replaceable(model, sites, include, exclude)
    check_seed(seed)
    changes = []
    for group, identifier in _assigned(feature_map, selected):
        template = feature_maps.resolve(identifier, num_features, seed)
        check_sinks(template, options, group)
        check_options(options, template)
        base_seed = template.seed if seed is None else seed
        changes += [(site, _copy(template, base_seed, site), options) for site in group]
    changes = _with_softmax_heads(changes, softmax_heads)
    check_sites(options, [site for site, _, _ in changes])
    saving.commit(model, sites, changes)
    return model


def restore_attention(
    model: keras.layers.Layer, *, include: str | list | Callable | None = None
) -> keras.layers.Layer:
    """Restores the softmax attention of a model, or of some of its layers, in place.

    All weights keep their values: they equal the checkpoint bit for bit, unless they
    were trained in the meantime. A warning names the weights that `uptrain` trained.

    Args:
        model: A model changed by `replace_attention`, or loaded from one.
        include: Layers to restore, in the forms that `replace_attention` takes; for
            example those that `diagnostics.Sensitivity.softmax_layers` selects. The
            others keep their trained maps. `None` restores all layers.

    Returns:
        The model.

    Raises:
        TypeError: If `model` is not a Keras layer.
        ValueError: If nothing in the model was replaced, `include` names a layer that
            is not linear, or none, or a built optimizer cannot drop the maps' weights.
            The model is unchanged in that case.

    Examples:
        >>> inputs = keras.Input((8, 16))
        >>> outputs = keras.layers.MultiHeadAttention(2, 8)(inputs, inputs)
        >>> model = keras.Model(inputs, outputs)
        >>> model = keras_rfattn.replace_attention(model, "favorplus")
        >>> model = keras_rfattn.restore_attention(model)
        >>> keras_rfattn.describe_attention(model).rows[0].mechanism
        'softmax'
    """
    check_model(model)
    sites = survey(model)
    linear = [site for site in sites if site.is_linear]
    if not linear:
        raise ValueError(
            "`model` must have linear attention. Received: "
            f"model={title(model)}. It holds:\n{_listing(sites)}"
        )
    if include is not None:
        linear = select(sites, include, None)
        softmax = [site for site in linear if not site.is_linear]
        if softmax or not linear:
            raise ValueError(
                "`include` must select layers with linear attention. Received: "
                f"include={include!r:.80}, which selects"
                + (f":\n{_listing(softmax)}" if softmax else " no layer.")
            )
    trained = dict.fromkeys(path for site in linear for path in site.layer.trained)
    if trained:
        warnings.warn(
            f"Softmax is restored in {title(model)}, but not the checkpoint: `uptrain` "
            f"trained {len(trained)} of its own weights: {', '.join(trained)}.",
            stacklevel=2,
        )
    saving.revert(model, sites, linear)
    return model


def _replaceable(model, sites, include, exclude):
    if isinstance(model, LinearAttention) or swap.linear_class(type(model)):
        raise ValueError(
            "`model` must be a model that holds attention, not the attention layer "
            f"itself. Received: {title(model)}. Use `keras_rfattn.layers` instead."
        )
    if not sites:
        inner = sorted({type(x).__name__ for x in model._flatten_layers()})
        raise ValueError(
            f"`model` must have attention. Received: {title(model)}, which holds "
            f"{', '.join(inner)}. Pass a model with MultiHeadAttention inside."
        )
    selected = select(sites, include, exclude)
    already = [site for site in selected if site.is_linear]
    if already:
        raise ValueError(
            f"`model` must have softmax attention. Received: {title(model)}, whose "
            f"attention is already linear at:\n{_listing(already)}\nCall "
            "`restore_attention(model)` first, or leave these out with `exclude`."
        )
    if include is None:
        selected = [site for site in selected if not is_pooling(site)]
    selected = _global(model, selected)
    refused = [site for site in selected if site.reason]
    if refused:
        raise ValueError(
            "`model` must have attention that can be made linear. Received: "
            f"{title(model)} with:\n"
            f"{_listing(refused)}\nLeave these softmax with `exclude` (paths or "
            "patterns), or use another model."
        )
    if not selected:
        raise ValueError(
            "`include` and `exclude` must leave layers to replace. Received: "
            f"include={include!r}, exclude={exclude!r}, for {title(model)} with:\n"
            f"{_listing(sites)}"
        )
    unbuilt = [site for site in selected if not site.layer.built]
    if unbuilt:
        raise ValueError(
            "`model` must have built attention layers. Received: layers that are not "
            f"built:\n{_listing(unbuilt)}\nCall the model once on data first."
        )
    return selected


def _global(model, selected):
    """Returns the selected sites without those that a sliding window makes local."""
    found = [site for site in selected if site.window is None]
    if selected and not found:
        raise ValueError(
            "`model` must have attention to all tokens among the selected layers. "
            f"Received: {title(model)}, in which they are all local already:\n"
            f"{_listing(selected)}\nThere is nothing to replace. Use "
            "`drop_sliding_window=True` to replace them all the same: linear attention "
            "then sees all tokens."
        )
    return found


def _assigned(feature_map, selected):
    """Returns pairs `(sites, feature map)`; sites with the same map form one pair."""
    if not isinstance(feature_map, Plan):
        return [(selected, feature_map)]
    maps = lookup("maps", feature_map.maps, selected)
    found = [
        ([site], maps[site.index])
        for site in selected
        if maps.get(site.index) is not None
    ]
    if not found:
        raise ValueError(
            "`feature_map` must replace at least one layer. Received: a plan that "
            f"keeps every layer softmax, {feature_map}."
        )
    return found


def _with_softmax_heads(changes, softmax_heads):
    """Adds the softmax heads of each layer to the options in its change."""
    if softmax_heads is None:
        return changes
    if not isinstance(softmax_heads, dict):
        raise ValueError(
            "`softmax_heads` must be a dict that maps layer paths or patterns to lists "
            f"of heads. Received: softmax_heads={softmax_heads!r:.80}."
        )
    sites = [site for site, _, _ in changes]
    kept = lookup("softmax_heads", softmax_heads, sites)
    found = []
    for site, feature_map, options in changes:
        heads = kept.get(site.index, ())
        options = dataclasses.replace(options, softmax_heads=heads)
        check_softmax_heads(options.softmax_heads, num_heads(site.layer), site.path)
        found.append((site, feature_map, options))
    return found


def check_sinks(template, options, sites):
    """Raises `ValueError` for what cannot be combined with attention sinks."""
    sinks = [site for site in sites if site.linear_class.sink_logits]
    kernel = template.exact_kernel
    has_offset = kernel is not None and kernel.has_offset
    is_plain = options.window is None and not options.asks_for_kernels
    if sinks and (has_offset or not is_plain):
        raise ValueError(
            "Attention sinks, logits in the denominator of softmax, need features of "
            "softmax, without windows and fused kernels. Received: feature_map="
            f"{template.get_config()}, window={options.window}, implementation="
            f"{options.implementation!r} for:\n{_listing(sinks)}\nUse a map of "
            "softmax such as 'favorpp', window=None and implementation='xla', or "
            "leave these out with `exclude`."
        )


def _may_cross(site):
    known = site.self_attention
    return not known and (known is False or False in kinds_in_graph(site.layer))


def check_sites(options, sites):
    """Raises `ValueError` for options that the attention of some sites rules out."""
    cross = []
    if options.window is not None:
        cross = [x for x in sites if _may_cross(x) and not x.causal]
    if cross:
        raise ValueError(
            "A `window` needs self-attention, in which queries and keys belong to the "
            f"same tokens. Received: window={options.window}, but query and value are "
            "different tensors at:\n"
            f"{_listing(cross)}\nLeave these out with `exclude`."
        )
    prefix = [site for site in sites if has_prefix(site)]
    is_plain = options.window is None and not options.asks_for_kernels
    if prefix and not is_plain:
        raise ValueError(
            "Attention in which all tokens see a prompt (prefix-LM) has no windows and "
            f"no fused kernels. Received: window={options.window}, implementation="
            f"{options.implementation!r} for:\n{_listing(prefix)}\nUse window=None and "
            "implementation='xla', or leave these out with `exclude`."
        )


def _copy(template, seed, site):
    """Copies the map for one layer, with a seed derived for that layer."""
    copy = template.reseeded(derive_seed(seed, site.index))
    copy.name = "feature_map"
    return copy


def _listing(sites):
    lines = []
    for site in sites:
        line = f"  {site.path} ({swap.original_class(site.layer).__name__})"
        remark = local_note(site) or site.reason
        lines.append(f"{line}: {remark}" if remark else line)
    return "\n".join(lines)

"""Replaces softmax attention by linear attention inside the existing layers.

All checks run, and all new weights are built, before the first layer changes. `swap`
changes a single layer; `saving` changes the containers that hold it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras

import keras_rfattn.models.saving as saving
import keras_rfattn.models.swap as swap
from keras_rfattn import feature_maps
from keras_rfattn.arguments import check_flag, check_seed, derive_seed
from keras_rfattn.layers.attend import check_options
from keras_rfattn.layers.checks import check_model, title
from keras_rfattn.layers.linear_attention import LinearAttention
from keras_rfattn.layers.self_attention import kinds_in_graph
from keras_rfattn.layers.softmax_heads import check_softmax_heads
from keras_rfattn.models.matching import assign, by_heads, select
from keras_rfattn.models.report import local_note
from keras_rfattn.models.survey import survey
from keras_rfattn.ops.options import Options


def replace_attention(
    model: keras.layers.Layer,
    feature_map: Any = feature_maps.DEFAULT,
    *,
    num_features: int | None = None,
    seed: int | None = None,
    include: str | list | None = None,
    exclude: str | list | None = None,
    drop_sliding_window: bool = False,
    drop_soft_cap: bool = False,
    **options: Any,
) -> keras.layers.Layer:
    """Makes the attention of a model linear in sequence length, in place.

    Every pretrained weight stays the same variable with the same name.
    `describe_attention` reports what was replaced; `restore_attention` restores it. If
    the model was trained, compile it with a new optimizer before both. A layer with a
    sliding window is linear in length already and keeps its softmax.

    Args:
        model: A built Keras model or layer with `keras.layers.MultiHeadAttention`,
            `GroupQueryAttention` or KerasHub's attention inside.
        feature_map: Name of a mechanism (`keras_rfattn.feature_maps.list()`), a
            `FeatureMap`, its config, or a `models.Plan` of them for some layers.
        num_features: Number of random vectors per head, for a map given by name.
            `None` uses the map's default, which is twice the head dim for most maps.
        seed: Seed of the random vectors, from which each layer derives its own.
            `None` uses the seed of the feature map.
        include: Layers to replace: a path or pattern (`fnmatch`), or a list of these.
            `None` selects all layers except those that pool with a single query, where
            softmax is already linear.
        exclude: Layers to keep softmax, in the same forms.
        drop_sliding_window: Whether to replace layers with a sliding window too.
        drop_soft_cap: Whether to replace layers with a soft cap on their logits (Gemma
            2), which linear attention ignores.
        **options: The options of `keras_rfattn.ops.Options`, such as `window`, for all
            layers to which a plan gives no others. `softmax_heads` may also be what
            `keras_rfattn.select_heads` returned, or a dict from paths or patterns of
            layers to heads; a layer keeps its softmax if all its heads do.

    Returns:
        The model.

    Raises:
        ValueError: If an argument is invalid, or the layers cannot be made linear, or
            an optimizer has trained and maps have weights too. The model is unchanged
            in that case.

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
    check_seed(seed)
    heads = {}
    if isinstance(options.get("softmax_heads"), Mapping):
        heads = options.pop("softmax_heads")
    options = Options.of_call(replace_attention, options)
    check_flag("drop_sliding_window", drop_sliding_window)
    check_flag("drop_soft_cap", drop_soft_cap)
    sites = survey(model, drop_sliding_window, drop_soft_cap)
    selected = _replaceable(model, sites, include, exclude)
    whole, partial = by_heads("softmax_heads", heads, selected)
    if len(whole) == len(selected):
        raise ValueError(
            "`softmax_heads` must leave at least one linear head. Received: all heads "
            f"of every selected layer, softmax_heads={heads}."
        )
    softmax_heads = {site.index: x.softmax_heads for site, x in partial}
    whole = {site.index for site in whole}
    selected = [site for site in selected if site.index not in whole]
    changes = []
    for group, identifier, choice in assign(feature_map, options, selected):
        template = feature_maps.resolve(identifier, num_features, seed)
        check_change(template, choice, group)
        base_seed = template.seed if seed is None else seed
        for site in group:
            own = template.reseeded(derive_seed(base_seed, site.index))
            kept = softmax_heads.get(site.index, choice.softmax_heads)
            changes.append((site, own, dataclasses.replace(choice, softmax_heads=kept)))
    saving.commit(sites, changes)
    return model


def restore_attention(
    model: keras.layers.Layer, *, include: str | list | dict | None = None
) -> keras.layers.Layer:
    """Restores the softmax attention of a model, or of parts of it, in place.

    All weights keep their values: they equal the checkpoint bit for bit, unless they
    were trained in the meantime (`trained` in the report of `uptrain` names these).

    Args:
        model: A model changed by `replace_attention`, or loaded from one.
        include: Layers to restore, in the forms that `replace_attention` takes, or
            heads: what `keras_rfattn.select_heads` returned, or a dict from paths or
            patterns of layers to key/value heads. All others keep their trained maps.
            `None` restores all layers.

    Returns:
        The model.

    Raises:
        ValueError: If nothing in the model was replaced, `include` names a layer that
            is not linear, or an optimizer has trained the maps. The model is
            unchanged in that case.
    """
    check_model(model)
    sites = survey(model)
    linear = [site for site in sites if site.is_linear]
    if not linear:
        raise ValueError(
            "`model` must have linear attention. Received: "
            f"model={title(model)}. It holds:\n{_listing(sites)}"
        )
    partial = []
    if isinstance(include, Mapping):
        linear, partial = by_heads("include", include, linear)
    elif include is not None:
        linear = select(sites, include, None)
        softmax = [site for site in linear if not site.is_linear]
        if softmax or not linear:
            raise ValueError(
                "`include` must select layers with linear attention. Received: "
                f"include={include!r:.80}, which selects no layer, or softmax at:\n"
                f"{_listing(softmax)}"
            )
    saving.revert(sites, linear, partial)
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
    _refuse(
        [site for site in selected if site.is_linear],
        "`model` must have softmax attention",
        f"{title(model)}, whose attention is already linear at",
        "Call `restore_attention(model)` first, or leave these out with `exclude`.",
    )
    if include is None:
        selected = [site for site in selected if not site.block.is_pooling]
    if not selected:
        raise ValueError(
            "`include` and `exclude` must leave layers to replace. Received: "
            f"include={include!r}, exclude={exclude!r}, for {title(model)} with:\n"
            f"{_listing(sites)}"
        )
    found = [site for site in selected if site.window is None]
    _refuse(
        [] if found else selected,
        "`model` must have attention to all tokens among the selected layers",
        f"{title(model)}, in which they are all local already",
        "There is nothing to replace. Use `drop_sliding_window=True` to replace them "
        "all the same: linear attention then sees all tokens.",
    )
    check_sites(model, found)
    return found


def _refuse(sites, expected, received, way_out):
    """Raises `ValueError` that lists sites, if there are any."""
    if sites:
        raise ValueError(
            f"{expected}. Received: {received}:\n{_listing(sites)}\n{way_out}"
        )


def check_sites(model, sites):
    """Raises `ValueError` for sites whose attention cannot be made linear."""
    _refuse(
        [site for site in sites if site.reason],
        "`model` must have attention that can be made linear",
        f"{title(model)} with attention that cannot, at",
        "Leave these softmax with `exclude` (paths or patterns), or use another model.",
    )
    _refuse(
        [site for site in sites if not site.layer.built],
        "`model` must have built attention layers",
        "layers that are not built",
        "Call the model once on data first.",
    )


def check_change(feature_map, options, sites):
    """Raises `ValueError` for a map and options that some sites rule out."""
    check_options(options, feature_map)
    _check_map(feature_map, sites)
    _check_window(options, sites)
    for site in sites:
        count, _ = site.linear_class._kv_shape(site.layer)
        check_softmax_heads(options.softmax_heads, count, site.path)


def _check_map(feature_map, sites):
    """Raises `ValueError` for a map that cannot compute the attention of some sites."""
    kernel = feature_map.exact_kernel
    if kernel is not None and kernel.has_offset:
        _refuse(
            [site for site in sites if site.linear_class.sink_logits],
            "Attention sinks, logits in the denominator of softmax, need features of "
            "softmax",
            f"feature_map={feature_map.get_config()}",
            "Use a map of softmax such as 'favorpp', or leave these out with "
            "`exclude`.",
        )


def _check_window(options, sites):
    """Raises `ValueError` for a window, or kernels, that some sites cannot have."""
    if options.window is not None:
        _refuse(
            [x for x in sites if _may_cross(x) and not x.causal],
            "A `window` needs self-attention, in which queries and keys belong to the "
            "same tokens",
            f"window={options.window}, but query and value are different tensors",
            "Leave these out with `exclude`.",
        )
    if options.window is not None or options.asks_for_kernels:
        _refuse(
            [x for x in sites if x.linear_class.sink_logits or x.has_prefix],
            "Attention with sinks, logits in the denominator of softmax, or in which "
            "all tokens see a prompt (prefix-LM) has no windows and no fused kernels",
            f"window={options.window}, implementation={options.implementation!r}",
            "Use window=None and implementation='xla', or leave these out with "
            "`exclude`.",
        )


def _may_cross(site):
    known = site.self_attention
    return not known and (known is False or False in kinds_in_graph(site.layer))


def _listing(sites):
    lines = []
    for site in sites:
        line = f"  {site.path} ({swap.original_class(site.layer).__name__})"
        remark = local_note(site) or site.reason
        lines.append(f"{line}: {remark}" if remark else line)
    return "\n".join(lines)

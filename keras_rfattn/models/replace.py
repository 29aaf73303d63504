"""Surgery: linear attention where softmax was, in the very same layers.

The layer object changes class and gains a feature map; its projections, their
names, the graph and the parents stay as they are. Everything is checked, and every
new weight made, before the first layer is touched.
"""

import contextlib

import keras
import numpy as np

from keras_rfattn import feature_maps
from keras_rfattn.feature_maps.arguments import derive_seed
from keras_rfattn.layers.attend import check_window
from keras_rfattn.layers.attention import OPTIONS
from keras_rfattn.layers.attention import STATE
from keras_rfattn.layers.attention import LinearAttention
from keras_rfattn.layers.attention import check_model
from keras_rfattn.layers.attention import title
from keras_rfattn.layers.fingerprint import unmark
from keras_rfattn.models import carriers
from keras_rfattn.models import keras_layers
from keras_rfattn.models import report
from keras_rfattn.models import sites as s
from keras_rfattn.ops.causal import check_block_size


def replace_attention(
    model,
    feature_map="favorpp",
    *,
    num_features=None,
    include=None,
    exclude=None,
    seed=None,
    block_size=None,
    window=None,
    sliding=False,
):
    """Makes the attention of a model linear in sequence length, in place.

    Every pretrained weight is kept, as the same variable with the same name. What
    was done is told by `describe_attention(model)`, and undone by
    `restore_attention(model)`.

    Args:
        model: A built Keras model or layer: KerasHub backbone or task, KerasCV
            layer, or any model with `keras.layers.MultiHeadAttention` or
            `keras.layers.GroupQueryAttention` inside.
        feature_map: Name of a mechanism (`keras_rfattn.feature_maps.list()`), a
            `FeatureMap`, or its config. Each layer gets its own.
        num_features: Number of random vectors per head, for a map given by name.
        include: Layers to replace: a path or pattern (`fnmatch`), a list of those,
            or a callable `(path, layer) -> bool`. All by default.
        exclude: Layers to keep softmax, likewise.
        seed: Seed of the random vectors; each layer derives its own from it.
        block_size: Block length of causal attention; changes no number.
        window: Number of tokens within which attention stays exact: the sequence is
            cut into windows of so many, and features take over beyond. Needs a map
            of the softmax or polynomial kernel.
        sliding: Whether the window before a query's own is exact too (and, without
            causality, the one after).

    Returns:
        The model.

    Raises:
        TypeError: If `model` is not a Keras layer.
        ValueError: If an argument is invalid, the model has no attention, or
            attention is selected that linear attention cannot express. The model is
            unchanged then.
    """
    check_model(model)
    check_block_size(block_size)
    found = s.survey(model)
    selected = _replaceable(model, found, include, exclude)
    template = _template(feature_map, num_features, seed)
    _check_statistics(template, selected)
    check_window(window, sliding, template)
    _check_window_sites(window, selected)
    options = {"block_size": block_size, "window": window, "sliding": sliding}
    changes = [(site, _copy(template, site.index), options) for site in selected]
    commit(model, found, changes)
    return model


def restore_attention(model):
    """Gives a model its softmax attention back, in place.

    Projections stay as they are: bit for bit those of the checkpoint, unless they
    were trained since.

    Args:
        model: A model changed by `replace_attention`, or loaded from one.

    Returns:
        The model.

    Raises:
        TypeError: If `model` is not a Keras layer.
        ValueError: If nothing in the model was replaced.
    """
    check_model(model)
    found = s.survey(model)
    linear = [site for site in found.sites if site.is_linear]
    if not linear:
        raise ValueError(
            "`model` has no linear attention to restore. Received: "
            f"model={title(model)}. It holds:\n{_listing(found.sites)}"
        )
    for site in linear:
        _make_softmax(site.layer)
    for container, _ in found.containers.values():
        if isinstance(container, carriers.Carrier):
            container.__class__ = type(container).original_class
    _companions(model, found, restore=True)
    _refresh(model, found)
    return model


def _replaceable(model, found, include, exclude):
    if isinstance(model, LinearAttention) or keras_layers.linear_class(type(model)):
        raise ValueError(
            "`model` must be a model that holds attention, not the attention layer "
            f"itself. Received: {title(model)}. Use `keras_rfattn.layers` instead."
        )
    if not found.sites:
        inner = sorted({type(x).__name__ for x in model._flatten_layers()})
        raise ValueError(
            f"`model` has no attention. Received: {title(model)}, which holds "
            f"{', '.join(inner)}. Pass a model with MultiHeadAttention inside."
        )
    selected = s.select(found.sites, include, exclude)
    already = [site for site in selected if site.is_linear]
    if already:
        raise ValueError(
            f"Attention is linear already at:\n{_listing(already)}\nCall "
            "`restore_attention(model)` first, or leave these out with `exclude`."
        )
    if include is None:
        selected = [site for site in selected if not s.is_pooling(site)]
    refused = [site for site in selected if site.reason]
    if refused:
        raise ValueError(
            f"{title(model)} has attention that cannot be made linear:\n"
            f"{_listing(refused)}\nLeave these softmax with `exclude` (paths or "
            "patterns), or use another model."
        )
    if not selected:
        raise ValueError(
            f"No attention of {title(model)} is left to replace. Received: "
            f"include={include!r}, exclude={exclude!r}. It holds:\n"
            f"{_listing(found.sites)}"
        )
    unbuilt = [site for site in selected if not site.layer.built]
    if unbuilt:
        raise ValueError(
            f"Attention is not built yet at:\n{_listing(unbuilt)}\nCall the model "
            "once on data first."
        )
    return selected


def _template(feature_map, num_features, seed):
    if seed is not None and (
        isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0
    ):
        raise ValueError(
            f"`seed` must be a non-negative integer or `None`. Received: seed={seed!r}."
        )
    by_name = isinstance(feature_map, str)
    arguments = {"seed": seed} if by_name else {}
    template = feature_maps.get(feature_map, num_features=num_features, **arguments)
    return template if by_name or seed is None else template.reseeded(seed)


def _check_statistics(template, selected):
    unsafe = [site for site in selected if site.causal]
    if unsafe and not template.is_causal_safe:
        raise ValueError(
            "A statistic of the sequence at hand would leak the future into causal "
            f"attention. Received: feature_map={template.get_config()} for:\n"
            f"{_listing(unsafe)}\nUse statistics='stored' or 'auto'."
        )


def _check_window_sites(window, selected):
    if window is None:
        return
    cross = [site for site in selected if s.is_cross(site) and not site.causal]
    if cross:
        raise ValueError(
            "A `window` needs self-attention, where queries and keys are the same "
            f"tokens. Received: window={window}, and query and value are different "
            "tensors at:\n"
            f"{_listing(cross)}\nLeave these out with `exclude`."
        )


def _copy(template, index):
    """A map of its own for the layer at `index`, with a seed of its own."""
    copy = template.reseeded(derive_seed(template.seed, index))
    copy.name = "feature_map"
    return copy


def commit(model, found, changes):
    """Carries out a checked list of `(site, feature_map, options)`."""
    for site, feature_map, _ in changes:
        build_map(site.layer, feature_map)
    _check_optimizer(model, [feature_map for _, feature_map, _ in changes])
    for site, feature_map, options in changes:
        make_linear(site.layer, feature_map, options)
    for container, indices in found.containers.values():
        if any(found.sites[index].is_linear for index in indices):
            carriers.carry(container)
    _companions(model, found, restore=False)
    _refresh(model, found)


def _scope(layer):
    """The name scopes of a built layer's weights."""
    stack = contextlib.ExitStack()
    for name in (layer.path or layer.name).split("/"):
        stack.enter_context(keras.name_scope(name))
    return stack


def build_map(layer, feature_map):
    """Builds a map for a softmax layer, which stays as it is."""
    linear = keras_layers.linear_class(type(layer))
    kv_heads, head_dim = linear._kv_shape(layer)
    feature_map.name = "feature_map"
    feature_map.dtype_policy = layer.dtype_policy
    with _scope(layer):
        feature_map.build((None, None, kv_heads, head_dim))


def make_linear(layer, feature_map, options):
    """Makes a softmax layer linear; the map is built."""
    layer.__class__ = keras_layers.linear_class(type(layer))
    layer._tracker.unlock()
    try:
        layer._set_mechanism(feature_map, **options)
        with _scope(layer):
            layer._build_mechanism()
    finally:
        layer._lock_state()


def _make_softmax(layer):
    unmark(layer)
    layer._tracker.untrack(layer.feature_map)
    for name in ("feature_map", *OPTIONS, *STATE):
        if name == "feature_map" or name in vars(layer):
            delattr(layer, name)
    layer.__class__ = type(layer).original_class


def _check_optimizer(model, feature_maps_):
    """New trainable weights would have no slot in an optimizer already built."""
    trainable = [w.path for m in feature_maps_ for w in m.trainable_weights]
    optimizer = getattr(model, "optimizer", None)
    if trainable and optimizer is not None and optimizer.built:
        raise ValueError(
            "The model's optimizer is built and has no slots for the new trainable "
            f"weights {trainable}. Replace attention before training, or compile "
            "the model with a new optimizer first."
        )


def _companions(model, found, restore):
    """Lets libraries adjust what belongs to a model: tasks, preprocessors."""
    for hook in COMPANION_HOOKS:
        hook(model, found, restore)


# Callables `(model, survey, restore)`, added by library adapters.
COMPANION_HOOKS = []


def _refresh(model, found):
    """Drops compiled functions, and lets PyTorch see the weights as they are."""
    containers = [container for container, _ in found.containers.values()]
    for layer in [model, *containers, *(site.layer for site in found.sites)]:
        refresh_layer(layer)


def refresh_layer(layer):
    """Makes one layer forget what it compiled, and PyTorch recount its weights."""
    for name in ("train", "test", "predict", "generate"):
        if getattr(layer, f"{name}_function", None) is not None:
            setattr(layer, f"{name}_function", None)
    if keras.backend.backend() == "torch" and layer.built:
        layer._track_variables()


def _listing(sites):
    return "\n".join(f"  {report.line(site)}" for site in sites)

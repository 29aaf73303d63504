"""A DINOv2 read from an ONNX file computes what its weights say."""

import itertools

import numpy as np
import pytest
from scipy.special import erf

from recipes.common import dinov2_onnx

onnx = pytest.importorskip("onnx", reason="needs `pip install onnx`")

PATCH, GRID, LAYERS, HIDDEN, HEADS, INNER = 14, 2, 2, 16, 2, 24
CHANNELS = HIDDEN, 6, 5, 4
BACKBONE, LAYER = "backbone.embeddings", "backbone.encoder.layer"
LINEAR = "attention.query", "attention.key", "attention.value"


def draw_weights():
    """Returns weights by their names in PyTorch, with kernels `(inputs, outputs)`."""
    generator, found = np.random.default_rng(0), {}
    for name, shape in shapes().items():
        scale = 1 if name.startswith("decoder") else 0.3
        found[name] = generator.normal(scale=scale, size=shape).astype("float32")
        if name.endswith("running_var"):
            found[name] = 0.5 + np.abs(found[name])
    return found


def shapes():
    def layer(name, shape, outputs):
        return {f"{name}.weight": shape, f"{name}.bias": (outputs,)}

    found = {"positions": (1, GRID**2, HIDDEN), "class_position": (1, 1, HIDDEN)}
    found[f"{BACKBONE}.cls_token"] = 1, 1, HIDDEN
    projection = f"{BACKBONE}.patch_embeddings.projection"
    found |= layer(projection, (HIDDEN, 3, PATCH, PATCH), HIDDEN)
    for i in range(LAYERS):
        for part in (*LINEAR, "output.dense"):
            name = f"{LAYER}.{i}.attention.{part}"
            found |= layer(name, (HIDDEN, HIDDEN), HIDDEN)
        found |= layer(f"{LAYER}.{i}.mlp.fc1", (HIDDEN, INNER), INNER)
        found |= layer(f"{LAYER}.{i}.mlp.fc2", (INNER, HIDDEN), HIDDEN)
        for k in (1, 2):
            found |= layer(f"{LAYER}.{i}.norm{k}", (HIDDEN,), HIDDEN)
            found[f"{LAYER}.{i}.layer_scale{k}.lambda1"] = (HIDDEN,)
    found |= layer("backbone.layernorm", (HIDDEN,), HIDDEN)
    for i, (before, after) in enumerate(itertools.pairwise(CHANNELS), start=1):
        found |= layer(f"decoder.upconv{i}", (before, after, 4, 4), after)
        found |= layer(f"decoder.bn{i}", (after,), after)
        for name in ("running_mean", "running_var"):
            found[f"decoder.bn{i}.{name}"] = (after,)
    return found | layer("decoder.final_conv", (1, CHANNELS[-1], 1, 1), 1)


def write(path, weights):
    """Writes a file as PyTorch's exporter does: it renames kernels of linear layers."""
    tensors, nodes, helper = [], [], onnx.helper
    positions = {name: node for node, name in dinov2_onnx.POSITIONS.items()}
    for number, (name, weight) in enumerate(weights.items()):
        is_kernel = weight.ndim == 2
        renamed = f"onnx::MatMul_{number}" if is_kernel else name
        if name in positions:
            renamed, node = f"onnx::Reshape_{number}", positions[name]
            nodes.append(helper.make_node("Concat", [renamed], [node], node, axis=1))
        if is_kernel:
            node = "/" + name.replace(".", "/").replace("layer/", "layer.")
            node = node.replace("/weight", "/MatMul")
            nodes.append(helper.make_node("MatMul", ["x", renamed], [node], node))
        tensors.append(onnx.numpy_helper.from_array(weight, renamed))
    count = onnx.numpy_helper.from_array(np.array([HEADS]))
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
        linear(x, weights, f"{name}.attention.{part}").reshape(*x.shape[:2], HEADS, -1)
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
    backbone, head = dinov2_onnx.load(size, dinov2_onnx.read(path))
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


@pytest.mark.once
@pytest.mark.parametrize("name", [f"{LAYER}.1.norm1.bias", "decoder.bn1.running_mean"])
def test_other_files_are_refused(name, tmp_path):
    weights = draw_weights()
    weights["another"] = weights[name]
    with pytest.raises(ValueError, match="no place for .'another'"):
        dinov2_onnx.load(28, dinov2_onnx.read(write(tmp_path / "model.onnx", weights)))
    del weights["another"], weights[name]
    path = write(tmp_path / "model.onnx", weights)
    with pytest.raises(ValueError, match="argument"):
        dinov2_onnx.load(28, dinov2_onnx.read(path))

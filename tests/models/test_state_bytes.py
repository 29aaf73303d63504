"""Bytes of states in `describe_attention`, against the arrays of real states."""

import re

import keras
import numpy as np
import pytest

import keras_rfattn
from keras_rfattn import generation
from tests.models import families

keras_hub = pytest.importorskip("keras_hub")

LENGTH = 11
FEATURES = {"feature_map": "favorplus", "num_features": 16, "seed": 0}
WINDOW = FEATURES | {"window": 3}
THREE = {"num_query_heads": 6, "num_key_value_heads": 3, "hidden_dim": 24}
# Family, arguments of its builder, arguments of `replace_attention`.
CASES = {
    "features": ("gpt2", {}, FEATURES),
    "signed": ("gpt2", {}, FEATURES | {"feature_map": "poisson"}),
    "exact": ("gpt2", {}, {"feature_map": "polynomial"}),
    "window": ("llama", {}, WINDOW),
    "sinks": ("llama", {}, WINDOW | {"sinks": 2}),
    "sliding": ("llama", {}, WINDOW | {"sinks": 2, "sliding": True}),
    "kept heads": ("llama", THREE, FEATURES | {"softmax_heads": [0, 2]}),
    "all": ("llama", THREE, WINDOW | {"sliding": True, "softmax_heads": [1]}),
    "bfloat16": ("llama", {"dtype": "bfloat16"}, WINDOW | {"softmax_heads": [1]}),
    "kept layer": ("llama", {}, WINDOW | {"exclude": "*layer_0*"}),
    # Sliding windows stay softmax.
    "local layers": ("gemma3", {}, FEATURES),
}


def build(case):
    family, sizes, arguments = CASES[case]
    model, _ = families.build(family, **sizes)
    keras_rfattn.replace_attention(model, **arguments)
    # Compiles nothing.
    model.run_eagerly = True
    return model


def size(structure):
    """Bytes of arrays in memory."""
    arrays = keras.tree.flatten(structure)
    return sum(getattr(x, "nbytes", None) or x.numpy().nbytes for x in arrays)


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_the_arrays(case):
    model, ids = build(case), np.ones((1, 5), "int32")
    _, state = generation.prefill(model, ids, max_length=LENGTH)
    report = keras_rfattn.describe_attention(model, LENGTH)
    rows = [row.state_bytes for row in report.rows]
    assert rows == [size(state.layers[f"{i}"]) for i in range(len(rows))]
    assert report.state_bytes == sum(rows) == size(state.layers) > 0

    keras_rfattn.restore_attention(model)
    assert keras_rfattn.describe_attention(model, LENGTH).cache_bytes == 0
    images = [None] * 4 if case == "local layers" else []
    _, cache = model._build_cache(np.ones((1, LENGTH), "int32"), *images)
    assert report.cache_bytes == size(cache)


def test_bytes_of_a_decoder_behind_an_encoder():
    model, _ = families.build("bart")
    keras_rfattn.replace_attention(model, **FEATURES)
    report = keras_rfattn.describe_attention(model, LENGTH)
    ids = np.ones((1, LENGTH), "int32")
    cache = model._build_cache(ids, ids, ids)[-2]
    rows = {f"{i}": x.state_bytes for i, x in enumerate(report.rows) if x.causal}
    assert rows == {i: size(cache.layers[i]) for i in rows}
    assert len(rows) == 2 and report.state_bytes == sum(rows.values())


def test_bytes_by_length():
    reports = {
        case: [keras_rfattn.describe_attention(build(case), n) for n in (64, 8192)]
        for case in ("sliding", "kept heads")
    }
    one, other = reports["sliding"]
    assert one.state_bytes == other.state_bytes
    # Two of three key/value heads of two layers: a key, a value, a boolean.
    one, other = reports["kept heads"]
    each = 2 * (2 * (2 * 4 * 4) + 1)
    assert other.state_bytes - one.state_bytes == (8192 - 64) * each
    assert all("2 of 3 key/value heads softmax (0, 2)" in x.note for x in one.rows)


@pytest.mark.parametrize("case, length", [("features", 12), ("window", 8192)])
def test_the_report_shows_bytes(case, length):
    model = build(case)
    report = keras_rfattn.describe_attention(model)
    assert report.length == length
    for counted, start in ((report, f"one row of {length} tokens in float32: "),
                           (report.rows[0], "causal, .*, ")):  # fmt: skip
        state, cache = counted.state_bytes / 1e6, counted.cache_bytes / 1e6
        text = f"{start}state {state:.3g} MB, softmax's cache {cache:.3g} MB"
        assert re.search(text, str(report).replace("\n    ", " "))
    # A backbone alone does not generate.
    assert "softmax's cache" not in str(keras_rfattn.describe_attention(model.backbone))
    for length in (0, 1.5, "8"):
        with pytest.raises(ValueError, match="`length` must be a positive integer."):
            keras_rfattn.describe_attention(model, length)

"""Bytes of states, against the arrays that `prefill` returns."""

import keras
import numpy as np
import pytest

import keras_rfattn
from keras_rfattn import generation
from tests.models import families

FEATURES = {"feature_map": "favorplus", "num_features": 16, "seed": 0}
CASES = {
    "llama": FEATURES | {"window": 3, "sliding": True, "sinks": 2},
    "gpt2": FEATURES,
}


def size(structure):
    leaves = keras.tree.flatten(structure)
    return sum(keras.ops.convert_to_numpy(x).nbytes for x in leaves)


@pytest.mark.parametrize("family", CASES)
def test_bytes_are_those_of_the_state(family):
    model, _ = families.build(family)
    rows, length, ids = 3, 11, np.ones((3, 5), "int32")
    kept = keras_rfattn.describe_attention(model).kept
    excluded = [kept[0].path] if family == "llama" else []
    keras_rfattn.replace_attention(model, exclude=excluded, **CASES[family])
    _, state = generation.prefill(model, ids, max_length=length)
    found = generation.state_bytes(model, length, rows)
    assert found.state == size(state) > 0

    layers, heads, head_dim = {"llama": (2, 2, 4), "gpt2": (2, 2, 8)}[family]
    assert found.softmax_cache == layers * 2 * rows * length * heads * head_dim * 4

    # Only the excluded layer keeps more for more tokens.
    longer = generation.state_bytes(model, length + 7, rows)
    assert (
        longer.state - found.state
        == len(excluded) * rows * 7 * 2 * heads * head_dim * 4
    )
    one = generation.state_bytes(model, length)
    assert [rows * x for x in one] == list(found)


def test_only_softmax_heads_keep_every_token():
    model, _ = families.build("llama")
    keras_rfattn.replace_attention(model, softmax_heads=[1], window=3, **FEATURES)
    rows, length, ids = 3, 11, np.ones((3, 5), "int32")
    _, state = generation.prefill(model, ids, max_length=length)
    found, longer = (generation.state_bytes(model, n, rows) for n in (length, 64))
    assert found.state == size(state)
    # One of two key/value heads of each layer: a key, a value, a boolean.
    layers, head_dim = 2, 4
    each = layers * rows * (2 * head_dim * 4 + 1)
    assert longer.state - found.state == (64 - length) * each
    with pytest.raises(ValueError, match="`max_length` must be set, because 2 layers"):
        generation.prefill(model, ids)
    with pytest.raises(ValueError, match="has room for the keys and values of 5"):
        _, state = generation.prefill(model, ids, max_length=5)
        generation.step(model, ids[:, :1], state)


def test_bytes_follow_the_dtype():
    model, _ = families.build("llama", dtype="bfloat16")
    keras_rfattn.replace_attention(model, window=4, **FEATURES)
    _, state = generation.prefill(model, np.ones((1, 6), "int32"))
    leaves = [
        (x.shape, keras.backend.standardize_dtype(x.dtype))
        for x in keras.tree.flatten(state)
    ]
    sizes = {"float32": 4, "bfloat16": 2, "int32": 4, "bool": 1}
    assert "bfloat16" in {dtype for _, dtype in leaves}
    expected = sum(int(np.prod(shape)) * sizes[dtype] for shape, dtype in leaves)
    assert generation.state_bytes(model, 6).state == expected
    assert generation.state_bytes(model, 6).softmax_cache == 2 * 2 * 6 * 2 * 4 * 2


def test_bytes_of_something_else_are_refused():
    softmax, _ = families.build("gpt2")
    with pytest.raises(TypeError, match="must be a KerasHub CausalLM with linear"):
        generation.state_bytes(softmax, 8)
    keras_rfattn.replace_attention(softmax, **FEATURES)
    for arguments in ({"length": 0}, {"length": 8, "batch_size": 1.5}):
        with pytest.raises(ValueError, match="must be a positive integer. Received"):
            generation.state_bytes(softmax, **arguments)

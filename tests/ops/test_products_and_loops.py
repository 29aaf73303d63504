import importlib

import keras
import numpy as np
import pytest
from keras import ops

from keras_rfattn.backend import accumulated_matmul, precise_einsum
from keras_rfattn.layers.attend import attend
from keras_rfattn.ops import AttentionMask, Options
from tests import helpers as h
from tests.marks import ONE_BACKEND, first, first_on_jax


def test_sums_of_narrow_numbers_keep_growing():
    # A bfloat16 sum of ones stops at 256.
    ones = ops.ones((1, 1000), dtype="bfloat16")
    product = accumulated_matmul(ones, ops.transpose(ones))
    assert keras.backend.standardize_dtype(product.dtype) == "float32"
    assert float(h.to_numpy(product)[0, 0]) == 1000


@pytest.mark.parametrize("product", ["matmul", "einsum"])
def test_float64_stays_float64(product):
    with h.double_precision():
        x = np.random.default_rng(0).normal(size=(2, 5, 5))
        a, b = ops.convert_to_tensor(x[0]), ops.convert_to_tensor(x[1])
        if product == "matmul":
            actual = accumulated_matmul(a, b)
        else:
            actual = precise_einsum("ij,jk->ik", a, b)
        assert keras.backend.standardize_dtype(actual.dtype) == "float64"
        h.assert_close(actual, x[0] @ x[1], 1e-14)


# The file of this backend, whose limits tests change.
special = importlib.import_module(f"keras_rfattn.backend.{keras.backend.backend()}")


def forget_programs():
    """JAX would take what it has traced with other limits."""
    if keras.backend.backend() == "jax":
        special._call.clear_cache()


folds_blocks = pytest.mark.skipif(
    keras.backend.backend() == "tensorflow", reason="takes all blocks at once"
)


@folds_blocks
@pytest.mark.parametrize(
    "at_once", first_on_jax([2 * h.BATCH * h.HEADS * h.BLOCK, 2**19])
)
@pytest.mark.parametrize(
    "name", ["favorpp", pytest.param("polysketch", marks=ONE_BACKEND)]
)
def test_blocks_as_on_a_gpu(monkeypatch, name, at_once):
    # Ten blocks, two or all of them at once.
    feature_map, x = h.build(name), h.problem()
    mask = AttentionMask(
        h.padding_masks()["scattered"], causal=True, self_attention=True
    )

    def computed(is_on_gpu):
        forget_programs()
        monkeypatch.setattr(special, "_is_on_gpu", lambda *_: is_on_gpu)

        def function(*arrays):
            options = Options(block_size=h.BLOCK)
            return attend(*arrays, feature_map, mask=mask, options=options)

        tensors = [ops.convert_to_tensor(a) for a in x]
        return [h.one_program(function)(*tensors), *h.gradients(function, *x)]

    monkeypatch.setattr(special, "TOKENS_ON_GPU", at_once, raising=False)
    for there, here in zip(computed(True), computed(False), strict=True):
        h.assert_close(there, here, rtol=1e-5)


def test_one_block_larger_than_what_is_taken_at_once(monkeypatch):
    feature_map, x = h.build("favorpp"), h.problem()
    tensors = [ops.convert_to_tensor(a) for a in x]

    def function(block_size):
        options = Options(block_size=block_size)
        mask = AttentionMask(causal=True, self_attention=True)
        return h.one_program(
            lambda *x: attend(*x, feature_map, mask=mask, options=options)
        )(*tensors)

    expected = function(h.BLOCK)
    monkeypatch.setattr(special, "TOKENS", 1, raising=False)
    h.assert_close(function(h.LENGTH), expected, rtol=1e-5)


WINDOWS = {"favorplus": 4, "favorpp": h.LENGTH, "polysketch_learned": h.LENGTH}


@pytest.mark.parametrize("masked", first_on_jax([True, False]))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "name", first(["favorpp_dense", "polysketch", "elu", *WINDOWS])
)
def test_what_is_taken_at_once_changes_no_number(monkeypatch, name, causal, masked):
    # Rows, heads and blocks in turn, where a cache would not hold all.
    feature_map, x = h.build(name), h.problem()
    visible = h.padding_masks()["scattered"] if masked else None
    options = Options(block_size=h.BLOCK, window=WINDOWS.get(name))

    def computed(at_once, numbers):
        forget_programs()
        monkeypatch.setattr(special, "TOKENS", at_once, raising=False)
        for name in ("FLOATS", "FEATURES", "WEIGHTS"):
            monkeypatch.setattr(special, name, numbers, raising=False)

        def function(*arrays):
            mask = AttentionMask(visible, causal=causal, self_attention=True)
            return attend(*arrays, feature_map, mask=mask, options=options)

        tensors = [ops.convert_to_tensor(a) for a in x]
        return [h.one_program(function)(*tensors), *h.gradients(function, *x)]

    for part, whole in zip(computed(1, 1), computed(10**9, 10**12), strict=True):
        h.assert_close(part, whole, rtol=1e-5)

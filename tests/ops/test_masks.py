import keras
import numpy as np
import pytest
from keras import ops

from keras_rfattn.ops import AttentionMask, interpret_mask
from tests import helpers as h

T = 6
PADDING = np.array([[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]], bool)
LOWER = np.tri(T, dtype=bool)
BOTH = PADDING[:, None, :] & LOWER


def interpret(mask, key_length=T, **options):
    mask = ops.convert_to_tensor(mask)
    return interpret_mask(mask, T, key_length, **options)


def test_no_mask():
    assert interpret_mask(None, T, T) == AttentionMask()
    assert interpret_mask(None, T, T, causal=True) == AttentionMask(causal=True)


@pytest.mark.parametrize("dtype", ["bool", "int32", "float32"])
@pytest.mark.parametrize("shape", [(2, 1, T), (2, 1, 1, T)])
@pytest.mark.parametrize("causal", [False, True])
def test_padding(shape, dtype, causal):
    mask = interpret(PADDING.reshape(shape).astype(dtype), causal=causal)
    assert mask.causal is causal
    assert mask.query_mask is None and mask.offset is None
    h.assert_same(mask.key_mask, PADDING)
    assert keras.backend.standardize_dtype(mask.key_mask.dtype) == "bool"


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize(
    "dense, causal, key_mask",
    [
        (np.repeat(PADDING[:, None, :], T, 1), False, PADDING),
        (np.repeat(LOWER[None], 2, 0), True, np.ones_like(PADDING)),
        (BOTH, True, PADDING),
    ],
    ids=["padding", "causal", "both"],
)
def test_dense_masks_of_known_meaning(dense, causal, key_mask, rank):
    dense = dense if rank == 3 else dense[:, None]
    mask = interpret(dense)
    assert mask.causal is causal
    h.assert_same(mask.key_mask, key_mask)


def test_cross_attention_padding():
    dense = np.repeat(PADDING[:, None, :], 4, 1)
    mask = interpret_mask(ops.convert_to_tensor(dense), 4, T)
    assert not mask.causal
    h.assert_same(mask.key_mask, PADDING)


def window(mask):
    mask[:, 4, 0] = False


def hole(mask):
    mask[0, 3, 2] = False


def future(mask):
    mask[1, 2, 3] = True


def last_row_looks_like_padding(mask):
    mask[:, :-1] = False
    mask[:, 0, 0] = True


@pytest.mark.parametrize("damage", [window, hole, future, last_row_looks_like_padding])
def test_other_dense_masks_are_refused(damage):
    dense = BOTH.copy()
    damage(dense)
    with pytest.raises(ValueError, match="neither key padding nor causal"):
        interpret(dense)


def test_lower_triangles_of_other_lengths_are_refused():
    # Whether the last query sees all keys or query 0 the first, it does not say.
    with pytest.raises(ValueError, match="neither key padding nor causal"):
        interpret_mask(ops.convert_to_tensor(np.tri(3, T, dtype=bool)[None]), 3, T)


@pytest.mark.parametrize("dtype", ["bool", "int32", "float32"])
def test_two_axes_are_queries_and_keys(dtype):
    mask = interpret(LOWER.astype(dtype))
    assert mask.causal
    h.assert_same(mask.key_mask, np.ones((1, T), bool))
    mask = interpret(PADDING[:1].astype(dtype))
    assert not mask.causal
    h.assert_same(mask.key_mask, PADDING[:1])
    # As many rows as the batch: nothing tells them from queries, so queries they are.
    with pytest.raises(ValueError, match="neither key padding nor causal"):
        interpret_mask(ops.convert_to_tensor(PADDING), 2, T)


@pytest.mark.parametrize("shape", [(2, 1), (1, 1, 1)])
def test_one_key_stands_for_all(shape):
    mask = interpret_mask(ops.ones(shape, "bool"), 2, T)
    h.assert_same(mask.key_mask, np.ones((1, T), bool))


@pytest.mark.parametrize(
    "shape",
    [(T,), (2, 2, T, T), (2, 1, 1, T, T), (2, T), (2, T, T + 1), (2, 3, T), (2, 1, 3)],
)
def test_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match=r"must have shape .*Received.*\("):
        interpret(np.ones(shape, bool))


def test_an_interpreted_mask_is_kept():
    mask = AttentionMask(key_mask=ops.convert_to_tensor(PADDING), self_attention=True)
    assert interpret_mask(mask, T, T) is not None
    again = interpret_mask(mask, T, T, causal=True)
    assert again.causal and again.self_attention and again.key_mask is mask.key_mask
    assert interpret_mask(again, T, T).causal


def traced(function):
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
    import tensorflow as tf

    return tf.function(function)


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="torch does not trace")
def test_traced_masks():
    call = traced(lambda m: interpret_mask(m, T, T).key_mask)
    h.assert_same(call(ops.convert_to_tensor(PADDING[:, None])), PADDING)
    with pytest.raises(ValueError, match="cannot be examined inside a compiled"):
        call(ops.convert_to_tensor(BOTH))

"""Rows of attention against the algorithms, which never form them."""

import functools

import numpy as np
import pytest
from keras import ops

from keras_rfattn.layers.attention import Attention
from keras_rfattn.ops import AttentionMask, Options
from keras_rfattn.ops.layout import merge_heads, split_heads
from keras_rfattn.uptraining import attention
from tests import helpers as h
from tests.feature_maps.cases import case

CASES = {
    "bidirectional": {},
    "padded": {"mask": "scattered"},
    "causal": {"causal": True},
    "causal padded": {"causal": True, "mask": "left"},
    "window": {"window": 8},
    "window padded": {"window": 8, "mask": "left"},
    "sliding causal": {"window": 5, "sliding": True, "causal": True},
    "sliding": {"window": 5, "sliding": True, "mask": "middle"},
    "all near": {"window": 64},
}
PAIRS = h.over(list(CASES))


def attention_call(name, causal=False, mask=None, window=None, sliding=False):
    feature_map, size = h.build(name), case(name).size
    query, key, value = (ops.convert_to_tensor(x) for x in h.problem(size=size))
    key_mask = None
    if mask is not None:
        key_mask = ops.convert_to_tensor(h.padding_masks()[mask])
        visible = key_mask[:, :, None, None]
        key, value = ops.where(visible, key, 0), ops.where(visible, value, 0)
    return Attention(
        query, key, value,
        AttentionMask(key_mask=key_mask, causal=causal, self_attention=True),
        feature_map.default_scale(h.HEAD_DIM), feature_map,
        Options(block_size=h.BLOCK, window=window, sliding=sliding),
    )  # fmt: skip


def computed(call, function):
    """`function(call)`, as one program."""

    def of_tokens(query, key, value):
        return function(call.replace(query=query, key=key, value=value))

    return h.one_program(of_tokens)(call.query, call.key, call.value)


def output_by_rows(call, dropped=False):
    output = ops.matmul(
        student_rows(call, dropped), split_heads(call.value, call.key.shape[2])
    )
    return merge_heads(output, call.query.shape[2], call.query.shape[1])


def student_rows(call, dropped=False):
    positions, taken = attention._sampled_rows(call.query, 0.0, 512)
    positions = ops.repeat(positions, call.query.shape[2] // call.key.shape[2])
    visible, _ = attention._visible(call, positions)
    dropped = ops.convert_to_tensor(np.full(call.query.shape[0], dropped))
    return attention._student_rows(call, positions, taken, visible, dropped)


def layer_errors(call, fraction=0.0, max_rows=512):
    """The measurements of one call by name, in which no window is dropped."""
    dropped = ops.convert_to_tensor(np.zeros(h.BATCH, bool))
    found = computed(
        call, lambda x: attention.layer_errors(x, x, dropped, fraction, max_rows)
    )
    names = "squared", "norm", "mean_of_v", "divergence", "rows"
    return dict(zip(names, h.to_numpy(found), strict=True))


@pytest.mark.parametrize("name, label", PAIRS)
def test_rows_times_values_are_the_output(name, label):
    call = attention_call(name, **CASES[label])
    signed = not call.feature_map.is_positive
    real = np.ones((h.BATCH, h.LENGTH), bool)
    if "mask" in CASES[label]:
        # What rows of padding have is nobody's business.
        real = h.padding_masks()[CASES[label]["mask"]]

    found, expected = computed(call, lambda x: (output_by_rows(x), x.linear()))
    tolerance = 1e-3 if signed else 2e-5
    h.assert_close(h.to_numpy(found)[real], h.to_numpy(expected)[real], tolerance)


def test_a_dropped_window_leaves_the_features():
    call = attention_call("favorpp", window=8, causal=True)
    found, without, whole = computed(
        call,
        lambda x: (
            output_by_rows(x, dropped=True), x.without_window().linear(), x.linear()
        ),
    )  # fmt: skip
    h.assert_close(found, without, 2e-5)
    with pytest.raises(AssertionError, match="relative error"):
        h.assert_close(whole, without, 2e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_errors_are_those_of_outputs(causal):
    call = attention_call("favorpp", causal=causal, mask="right")
    found = layer_errors(call)
    real = h.padding_masks()["right"][:, :, None, None]

    def squares(x):
        return (np.where(real, h.to_numpy(x), 0) ** 2).sum((0, 1, 3))

    linear, softmax, mean = map(
        h.to_numpy,
        computed(call, lambda x: (x.linear(), x.softmax(), x.mean_of_values())),
    )
    h.assert_close(found["squared"], squares(linear - softmax), 1e-4)
    h.assert_close(found["norm"], squares(softmax), 1e-4)
    h.assert_close(found["mean_of_v"], squares(mean - softmax), 1e-4)
    h.assert_close(found["rows"], np.full(h.HEADS, real.sum()))
    # Of a distribution from another one, and of every row.
    assert np.all(found["divergence"] > 0)


def test_of_many_rows_some_are_compared():
    call = attention_call("favorpp", causal=True)
    every = layer_errors(call)
    some = [layer_errors(call, x, max_rows=10) for x in (0.0, 0.4)]
    for found in some:
        np.testing.assert_array_equal(found["rows"], 10 * h.BATCH)
        assert np.all(found["norm"] < every["norm"])
    assert np.any(some[0]["squared"] != some[1]["squared"])


def test_what_stands_for_a_window_alone_has_no_features():
    call = attention_call("favorpp", window=5, sliding=True, causal=True)
    query, key = call.scaled()
    positions = np.arange(h.LENGTH)
    apart = positions[:, None] // 5 - positions[None] // 5
    near = (apart >= 0) & (apart <= 1) & (positions[:, None] >= positions[None])
    groups = h.HEADS // h.KV_HEADS
    q, k, v = (h.to_numpy(x).transpose(0, 2, 1, 3) for x in (query, key, call.value))
    k, v = np.repeat(k, groups, axis=1), np.repeat(v, groups, axis=1)
    weights = np.where(near, np.exp(q @ k.swapaxes(-1, -2)), 0)
    expected = weights @ v / weights.sum(-1, keepdims=True)
    h.assert_close(call.window_alone(), expected.transpose(0, 2, 1, 3), 1e-5)
    assert not np.any(h.to_numpy(call.without_window().window_alone()))


def short_last(call, long):
    """The call with keys of length `long`, but for the last third, which are short.

    The exponents of short keys are larger by hundreds than those of long ones.
    """
    key = h.to_numpy(call.key)
    key = long * key / np.maximum(np.linalg.norm(key, axis=-1, keepdims=True), 1e-9)
    key[:, 2 * h.LENGTH // 3 :] *= 1e-3
    return call.replace(key=ops.convert_to_tensor(key.astype("float32")))


@pytest.mark.parametrize("label", ["causal", "causal padded"])
@pytest.mark.parametrize("name", ["favorplus", "favorpp_learned"])
def test_keys_that_a_row_does_not_see_have_no_part(name, label):
    call = short_last(attention_call(name, **CASES[label]), long=70.0)
    found, expected = computed(call, lambda x: (output_by_rows(x), x.linear()))
    real = np.ones((h.BATCH, h.LENGTH), bool)
    if "mask" in CASES[label]:
        real = h.padding_masks()[CASES[label]["mask"]]
    h.assert_close(h.to_numpy(found)[real], h.to_numpy(expected)[real], 1e-4)


@pytest.mark.parametrize("size", [5.55, 5.625, 15.0])
def test_gradients_are_finite_where_a_later_key_has_larger_exponents(size):
    feature_map = h.feature_maps.FavorPlus(num_features=16, seed=0)
    feature_map.build((None, None, 1, 8))
    query, key = np.ones((2, 1, 2, 1, 8), "float32")
    # The first query sees the first key only, and the exponents of a key of 0 are 0.
    key = key * np.array([size, 0.0], "float32")[:, None, None]
    value = np.array([[[[1.0]], [[2.0]]]], "float32")

    def call(query, key, value):
        mask = AttentionMask(causal=True, self_attention=True)
        return Attention(query, key, value, mask, 1.0, feature_map, Options())

    def loss(query, key, value):
        dropped = ops.zeros((1,), dtype="bool")
        teacher = call(*map(ops.convert_to_tensor, arrays))
        student = call(query, key, value)
        squared, _, _, divergence, _ = ops.unstack(
            attention.layer_errors(teacher, student, dropped, 0.0, 512)
        )
        return squared + divergence

    arrays = query, key, value
    gradients = [h.to_numpy(x) for x in h.gradient_of(loss)(*arrays)]
    assert all(np.all(np.isfinite(x)) for x in gradients) and np.any(gradients[2])
    rows = student_rows(call(*map(ops.convert_to_tensor, arrays)))
    h.assert_close(rows[0, 0, 0], np.array([1.0, 0.0]))


SEEN = 2 * h.LENGTH // 3
CAUSAL = {
    "grouped": {},
    "window with sinks": {"window": 5, "sliding": True, "sinks": 2},
    "padded window with sinks": {"window": 8, "sinks": 2, "mask": "left"},
    "prefix": {"prefix": 6},
}
LATER = h.over(
    [(label, *x) for label in CAUSAL for x in ((1e-3, "float32"), (10, "float16"))]
    + [("grouped", 10, "bfloat16")],
    ["favorplus", "favorpp_learned", "hedgehog"],
)


def causal_call(name, length, later, dtype, mask=None, prefix=0, **options):
    """The first tokens of one problem; keys from `SEEN` on are scaled by `later`."""
    feature_map = h.build(name)
    query, key, value = (x[:, :length] for x in h.problem(size=4.0))
    key = key * np.where(np.arange(length) < SEEN, 1, later)[:, None, None]
    key_mask = prefix_mask = None
    if mask is not None:
        key_mask = h.padding_masks()[mask][:, :length]
        key, value = (np.where(key_mask[..., None, None], x, 0) for x in (key, value))
    if prefix:
        prefix_mask = np.tile(np.arange(length) < prefix, (h.BATCH, 1))
    mask = AttentionMask(
        key_mask, causal=True, self_attention=True, prefix_mask=prefix_mask
    )
    tokens = (ops.cast(x.astype("float32"), dtype) for x in (query, key, value))
    scale = feature_map.default_scale(h.HEAD_DIM)
    return Attention(*tokens, mask, scale, feature_map, Options(**options))


@pytest.mark.parametrize("name, case", LATER)
def test_later_keys_change_neither_rows_nor_their_gradients(name, case):
    label, later, dtype = case
    whole, seen = (
        causal_call(name, length, later, dtype, **CAUSAL[label])
        for length in (h.LENGTH, SEEN)
    )
    rows, alone = computed(whole, student_rows), computed(seen, student_rows)
    shape = h.BATCH, h.KV_HEADS, -1, h.HEADS // h.KV_HEADS, h.LENGTH
    rows = h.to_numpy(rows).reshape(shape)[:, :, :SEEN]
    h.assert_close(rows[..., :SEEN], h.to_numpy(alone).reshape(*shape[:-1], SEEN), 2e-5)
    assert not np.any(rows[..., SEEN:])
    real = h.to_numpy(seen.mask.key_mask) if seen.mask.key_mask is not None else True
    total = rows.sum(-1).transpose(0, 2, 1, 3)[np.broadcast_to(real, (h.BATCH, SEEN))]
    np.testing.assert_allclose(total, 1, atol=1e-5)

    def loss(*tokens):
        query, key, value = (ops.cast(x, dtype) for x in tokens)
        call = whole.replace(query=query, key=key, value=value)
        dropped = ops.zeros((h.BATCH,), dtype="bool")
        found = attention.layer_errors(whole, call, dropped, 0.0, 512)
        return found[0] + found[3]

    tokens = [h.to_numpy(x).astype("float32") for x in tokens_of(whole)]
    gradients = [h.to_numpy(x) for x in h.gradient_of(loss)(*tokens)]
    assert all(np.all(np.isfinite(x)) and np.any(x) for x in gradients)


def tokens_of(call):
    return [ops.cast(x, "float32") for x in (call.query, call.key, call.value)]


@pytest.mark.parametrize("name", ["favorpp_learned", "hedgehog"])
def test_small_gradients_stay_normal_numbers(name):
    # The mean over many rows makes gradients small, and XLA sets subnormal ones to 0.
    call = attention_call(name, mask="right")
    arrays = call.query, call.key, call.value

    def loss(query, key, value, factor):
        dropped = ops.zeros((h.BATCH,), dtype="bool")
        student = call.replace(query=query, key=key, value=value)
        squared, _, _, divergence, _ = ops.unstack(
            attention.layer_errors(call, student, dropped, 0.0, 512)
        )
        return factor * (squared + divergence)

    whole, small = (
        h.gradient_of(functools.partial(loss, factor=factor))(*arrays)
        for factor in (1.0, 1e-10)
    )
    for gradient, expected in zip(small, whole, strict=True):
        h.assert_close(gradient * 1e10, expected, 1e-4)

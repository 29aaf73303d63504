"""Sinks, the exact first tokens, against their definition: every weight one by one."""

import numpy as np
import pytest
from keras import ops

from keras_rfattn.layers.attend import attend
from keras_rfattn.layers.attention import Attention
from keras_rfattn.layers.decoding import onward
from keras_rfattn.ops import AttentionMask, Options
from keras_rfattn.ops.kernel_attention import exact_attention
from tests import helpers as h
from tests.feature_maps.cases import case
from tests.marks import SLOW_ON_JAX, first_on_jax
from tests.ops.definition import weighed

WINDOW, SINKS = 5, 3
FORMS = h.FORMS
SHAPES = [(causal, sliding) for causal in (True, False) for sliding in (True, False)]
# Each form and each shape once on JAX; all of them elsewhere.
CASES = [
    pytest.param(
        name, shape, kind, marks=() if i % 4 == j and k == i % 2 else SLOW_ON_JAX
    )
    for i, name in enumerate(FORMS)
    for j, shape in enumerate(SHAPES)
    for k, kind in enumerate(("left", "scattered"))
]


def scale_of(name):
    return h.build(name).default_scale(h.HEAD_DIM) * case(name).size ** 2


def linear(name, mask, causal, window=WINDOW, sliding=False, sinks=SINKS):
    """`(query, key, value) -> output`, of unscaled arrays."""
    feature_map, visible = h.build(name), ops.convert_to_tensor(mask)
    options = Options(window=window, sliding=sliding, sinks=sinks)
    mask = AttentionMask(visible, causal=causal, self_attention=True)

    def call(query, key, value):
        # The mask hides the output of padding too; this test compares all queries.
        given = mask.replace(query_mask=ops.ones_like(visible))
        return attend(
            query, key, value, feature_map, given, scale_of(name), options
        )  # fmt: skip

    return call


def definition(name, mask, causal, sliding, window=WINDOW, sinks=SINKS):
    """The same by a matrix of weights."""
    feature_map, tokens = h.build(name), np.arange(h.LENGTH)
    position = tokens - mask.argmax(axis=1)[:, None]
    near = np.zeros((h.BATCH, h.LENGTH, h.LENGTH), bool)
    if window is not None:
        own = (position % h.LENGTH) // window
        ahead = own[:, None, :] - own[:, :, None]
        near = (ahead <= 0 if causal else ahead <= sliding) & (ahead >= -int(sliding))
    near = near | ((position >= 0) & (position < sinks))[:, None]
    visible = np.broadcast_to(mask[:, None, :], near.shape)
    if causal:
        visible = visible & np.tri(h.LENGTH, dtype=bool)

    def call(query, key, value):
        side = scale_of(name) ** 0.5
        seen = ops.convert_to_tensor(mask[:, :, None, None])
        query, key = query * side, ops.where(seen, key * side, 0)
        return weighed(feature_map, query, key, value, near, visible)

    return call


def small_problem():
    """Logits so small that features of any map are of use."""
    return [ops.convert_to_tensor(a) for a in h.problem(size=0.5)]


@pytest.mark.parametrize(("name", "shape", "kind"), CASES)
def test_matches_the_definition(name, shape, kind):
    (causal, sliding), mask = shape, h.padding_masks()[kind]
    x = small_problem()
    actual = h.to_numpy(linear(name, mask, causal, sliding=sliding)(*x))
    expected = h.to_numpy(definition(name, mask, causal, sliding)(*x))
    h.assert_close(actual, expected)
    # The sinks matter, or the comparison would show nothing.
    without = definition(name, mask, causal, sliding, sinks=0)(*x)
    assert np.abs(h.to_numpy(without) - expected).max() > 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize("name", first_on_jax(FORMS))
def test_gradients_match_the_definition(name):
    mask = h.padding_masks()["left"]
    x = [h.to_numpy(a) for a in small_problem()]
    actual = h.gradients(linear(name, mask, True), *x)
    expected = h.gradients(definition(name, mask, True, False), *x)
    for a, e in zip(actual, expected, strict=True):
        h.assert_close(a, e, 1e-5)


@pytest.mark.parametrize("causal", first_on_jax([True, False]))
@pytest.mark.parametrize("name", first_on_jax(FORMS))
def test_sinks_and_window_that_cover_a_row_are_exact(name, causal):
    """Every key is a sink or in the window of the last queries."""
    mask = np.ones((h.BATCH, h.LENGTH), bool)
    window = -(-h.LENGTH // 2)
    call = linear(name, mask, causal, window=window, sinks=window)
    query, key, value = small_problem()
    side = scale_of(name) ** 0.5
    expected = exact_attention(
        side * query, side * key, value, h.build(name).exact_kernel, None, causal
    )
    # The first half does not see the second exactly if attention is not causal.
    rows = slice(window, None) if not causal else slice(None)
    h.assert_close(h.to_numpy(call(query, key, value))[:, rows], expected[:, rows])


@pytest.mark.parametrize("name", first_on_jax(FORMS))
@pytest.mark.parametrize("causal", first_on_jax([True, False]))
def test_features_alone_know_no_sink(name, causal):
    mask = h.padding_masks()["left"]
    visible = ops.convert_to_tensor(mask)
    query, key, value = small_problem()
    shown = ops.expand_dims(visible, (2, 3))
    call = Attention(
        query, ops.where(shown, key, 0), ops.where(shown, value, 0),
        AttentionMask(visible, causal=causal, self_attention=True), scale_of(name),
        h.build(name), Options(window=WINDOW, sinks=SINKS),
    )  # fmt: skip
    expected = definition(name, mask, causal, False, None, 0)
    h.assert_close(call.features_alone(), expected(query, key, value))


@pytest.mark.parametrize(
    "sizes", first_on_jax([[1, 35, 1], [1] * 37, [2, 1, 9, 1, 24], [17, 20]])
)
@pytest.mark.parametrize("sliding", first_on_jax([True, False]))
@pytest.mark.parametrize("name", first_on_jax([FORMS[0], FORMS[-1]]))
def test_states_are_the_parallel_pass(name, sliding, sizes):
    mask = h.padding_masks()["left"]
    query, key, value = small_problem()
    expected = h.to_numpy(linear(name, mask, True, sliding=sliding)(query, key, value))
    options = Options(window=WINDOW, sliding=sliding, sinks=SINKS)
    state, outputs, start = None, [], 0

    def step(state, query, key, value, seen):
        mask = AttentionMask(seen, causal=True, self_attention=True)
        shown = ops.reshape(seen, (*ops.shape(seen), 1, 1))
        key, value = (ops.where(shown, x, 0) for x in (key, value))
        call = Attention(
            query, key, value, mask, scale_of(name), h.build(name), options
        )
        return onward(call, state)

    run = h.compiled(step)
    for size in sizes:
        part = slice(start, start + size)
        arrays = (x[:, part] for x in (query, key, value))
        seen = ops.convert_to_tensor(mask[:, part])
        output, state = (run if start else step)(state, *arrays, seen)
        outputs.append(h.to_numpy(output))
        start += size
    assert start == h.LENGTH
    actual = np.concatenate(outputs, axis=1)
    seen = mask.cumsum(axis=1) > 0
    h.assert_close(actual[seen], expected[seen])
    slots = SINKS + WINDOW * (1 + sliding)
    assert tuple(state.near.key.shape) == (h.BATCH, h.KV_HEADS, slots, h.HEAD_DIM)


def test_the_future_does_not_matter():
    mask, name = h.padding_masks()["left"], FORMS[0]
    x = [h.to_numpy(a) for a in small_problem()]
    call = linear(name, mask, True)
    expected = h.to_numpy(call(*map(ops.convert_to_tensor, x)))
    for token in (int(mask.argmax(axis=1).max()) + 1, 33):  # a sink, and a late key
        disturbed = [a.copy() for a in x]
        for a in disturbed[1:]:
            a[:, token:] *= 1e4
        output = h.to_numpy(call(*map(ops.convert_to_tensor, disturbed)))
        h.assert_same(output[:, :token], expected[:, :token])


def test_packed_texts_have_sinks_of_their_own():
    query, key, value = small_problem()
    feature_map, name = h.build(FORMS[0]), FORMS[0]
    options = Options(window=WINDOW, sinks=SINKS, max_segments=2)
    ids = np.repeat([[0] * 20 + [1] * (h.LENGTH - 20)], h.BATCH, axis=0)
    mask = AttentionMask(
        causal=True, self_attention=True, segment_ids=ops.convert_to_tensor(ids)
    )
    packed = attend(query, key, value, feature_map, mask, scale_of(name), options)
    mask = AttentionMask(causal=True, self_attention=True)
    for part in (slice(0, 20), slice(20, None)):
        arrays = (x[:, part] for x in (query, key, value))
        alone = attend(*arrays, feature_map, mask, scale_of(name), options)
        h.assert_close(h.to_numpy(packed)[:, part], alone)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 4, "sinks": -1}, "`sinks` must be a number of tokens"),
        ({"window": 4, "sinks": 1.5}, "`sinks` must be a number of tokens"),
        ({"window": 4, "sinks": True}, "`sinks` must be a number of tokens"),
        ({"window": 4, "sinks": 5}, "`sinks` must be at most `window`"),
        ({"sinks": 4}, "`sinks` need a `window`"),
        (
            {"window": 4, "sinks": 4, "implementation": "pallas"},
            "they have no sinks, and 4 are asked for|run on JAX",
        ),
    ],
)
def test_bad_sinks(options, message):
    with pytest.raises(ValueError, match=message):
        attend(*small_problem(), h.build("favorplus"), options=Options(**options))

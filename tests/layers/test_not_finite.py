"""One entry that is not finite: a NaN in every row that sees it, nothing elsewhere."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

from keras_rfattn.layers.attend import attend
from keras_rfattn.layers.attention import Attention
from keras_rfattn.layers.decoding import looked_up, onward
from keras_rfattn.ops import AttentionMask, Options
from tests import helpers as h
from tests.marks import SLOW_ON_JAX, first_on_jax

CONTENTS = (np.nan, np.inf, -np.inf)
GROUPS = h.HEADS // h.KV_HEADS
MASK = np.ones((h.BATCH, h.LENGTH), bool)
MASK[0, :3], MASK[1, 30:] = False, False
PREFIX = np.zeros((h.BATCH, h.LENGTH), bool)
PREFIX[:, :15] = True

# Options, whether attention is causal, and whether it has a prefix.
WAYS = {
    "bidirectional": ({}, False, False),
    "causal": ({"block_size": h.BLOCK}, True, False),
    "prefix": ({"block_size": h.BLOCK}, True, True),
    "window": ({"window": 8}, False, False),
    "sliding window": ({"window": 8, "sliding": True}, False, False),
    "window causal": ({"window": 8}, True, False),
    "sliding window causal": ({"window": 8, "sliding": True}, True, False),
    "window of all": ({"window": h.LENGTH}, False, False),
}
FORMS = [*h.FORMS, "polynomial"]
# On JAX by default each way once, and all forms where attention is causal.
CASES = [
    pytest.param(*case, marks=SLOW_ON_JAX if i and case[1] != "causal" else ())
    for way in WAYS
    for i, case in enumerate(
        (name, way) for name in FORMS if name in h.WINDOWED or "window" not in way
    )
]


@functools.cache
def program(name, way):
    options, is_causal, has_prefix = WAYS[way]
    # Built outside of the compiled function, which must not create weights.
    feature_map = h.build(name)

    def call(query, key, value):
        mask = AttentionMask(
            ops.convert_to_tensor(MASK), causal=is_causal, self_attention=True,
            prefix_mask=ops.convert_to_tensor(PREFIX) if has_prefix else None,
        )  # fmt: skip
        tokens = query, key, value
        return attend(*tokens, feature_map, mask, options=Options(**options))

    return h.compiled(call)


def run(name, way, x):
    return h.to_numpy(program(name, way)(*map(ops.convert_to_tensor, x)))


def sees(way, side, at):
    """`(B, T, N)`: which rows see the entry at `(batch, token, head)`."""
    batch, token, head = at
    _, is_causal, has_prefix = WAYS[way]
    rows = np.zeros((h.BATCH, h.LENGTH, h.HEADS), bool)
    if side == "query":
        rows[at] = True
        return rows
    heads = slice(head * GROUPS, (head + 1) * GROUPS)
    first = 0 if not is_causal or (has_prefix and PREFIX[batch, token]) else token
    rows[batch, first:, heads] = MASK[batch, token]
    return rows


PLACES = [
    ("query", 13, 3), ("key", 13, 1), ("key", 4, 0),
    ("value", 21, 1), ("key", 1, 0), ("value", 16, 0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "way"), CASES)
def test_what_sees_it_is_nan_and_nothing_else_changes(name, way):
    x = h.problem()
    expected = run(name, way, x)
    assert np.all(np.isfinite(expected))
    for i, (side, token, head) in enumerate(PLACES):
        content, entry, batch = CONTENTS[i % 3], 5 * i % h.VALUE_DIM, i % 2
        at = (batch, token, head)
        changed = x._replace(**{side: getattr(x, side).copy()})
        getattr(changed, side)[(*at, entry)] = content
        actual = run(name, way, changed)
        rows = sees(way, side, at)
        assert not np.any(np.isfinite(actual[rows])), (side, at, content)
        h.assert_same(actual[~rows], expected[~rows])


@pytest.mark.parametrize(("name", "way"), CASES)
def test_large_finite_numbers_stay_finite(name, way):
    x = h.problem()
    for size in (1e30, 3e38):
        query, key = x.query.copy(), x.key.copy()
        query[0, 13, 3, 5], key[1, 13, 1, 2] = size, -size
        query[1, 2], key[0, 21] = size, size
        output = run(name, way, x._replace(query=query, key=key))
        assert np.all(np.isfinite(output))
        assert np.any(output != 0)


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="reads values on a CPU")
def test_float16_where_no_value_is_read(monkeypatch):
    # On a GPU, PyTorch does not look whether tokens are finite: it bounds all of them.
    from keras_rfattn.backend import torch

    x, feature_map = h.problem(), h.build("favorpp")
    tokens = [ops.convert_to_tensor(y, dtype="float16") for y in x[:3]]
    expected = h.to_numpy(attend(*tokens, feature_map, AttentionMask()))
    monkeypatch.setattr(torch, "are_values_at_hand", lambda *arrays: False)
    found = h.to_numpy(attend(*tokens, feature_map, AttentionMask()))
    assert np.any(found != 0)
    h.assert_close(found, expected, rtol=h.NARROW["float16"])
    tokens[0][0, 3] = np.inf
    found = h.to_numpy(attend(*tokens, feature_map, AttentionMask()))
    assert np.isnan(found[0, 3]).all() and np.isfinite(found[0, 4:]).all()


@pytest.mark.parametrize("content", [-1e30, 3e38, np.nan])
@pytest.mark.parametrize("name", h.FORMS)
def test_the_future_changes_nothing(name, content):
    x, now = h.problem(), 21
    expected = run(name, "causal", x)
    x.query[:, now:], x.key[:, now:] = content, content
    # Sums of larger values overflow.
    x.value[:, now:] = 1e30 if abs(content) > 1e30 else content
    h.assert_same(run(name, "causal", x)[:, :now], expected[:, :now])


@pytest.mark.parametrize("way", first_on_jax(["causal", "bidirectional"]))
@pytest.mark.parametrize("name", h.FORMS)
def test_a_token_that_nothing_reads_is_in_no_gradient(name, way):
    x, call = h.problem(), program(name, way)

    def read(*tokens):
        return call(*tokens)[:, :20]

    gradient = h.gradient_of(read)
    expected = gradient(*x)
    x.query[:, 25, 1, 3] = np.nan
    x.key[0, 1], x.value[1, 32] = np.nan, np.inf
    for actual, wanted in zip(gradient(*x), expected, strict=True):
        h.assert_same(actual, wanted)


@functools.cache
def gradient_of_squares(name):
    call = program(name, "causal")
    return h.gradient_of(lambda *a: ops.square(call(*a)))


@pytest.mark.parametrize("side", ["query", "key", "value"])
@pytest.mark.parametrize("name", h.FORMS)
def test_gradients_know_too(name, side):
    # Else an optimizer would go on as if nothing were wrong.
    x = h.problem()
    getattr(x, side)[1, 9, 1, 3] = np.nan
    found = gradient_of_squares(name)(*x)
    assert not np.all(np.isfinite(np.concatenate([g.ravel() for g in found])))


@pytest.mark.parametrize("way", ["softmax", "mean_of_values", "window_alone"])
def test_controls_know_too(way):
    x = h.problem()
    x.value[1, 9, 1, 3] = np.inf
    tokens = map(ops.convert_to_tensor, x)
    mask, options = AttentionMask(causal=True, self_attention=True), Options(window=8)
    call = Attention(*tokens, mask, 0.2, h.build("favorpp"), options)
    lost = np.isnan(h.to_numpy(getattr(call, way)()))
    expected = np.zeros(lost.shape, bool)
    expected[1, 9:, GROUPS:] = True
    np.testing.assert_array_equal(lost, expected)


@functools.cache
def stretch(name, window):
    """`(query, key, value, state) -> output, state` of some tokens after others."""
    feature_map, options = h.build(name), Options(window=window)

    def call(query, key, value, state):
        mask = AttentionMask(causal=True, self_attention=True)
        tokens = query, key, value
        return onward(Attention(*tokens, mask, 0.2, feature_map, options), state)

    return h.one_program(call)


def steps(name, x, stops, window):
    """Outputs of stretches of tokens, each after the state of those before it."""
    state, outputs, start = None, [], 0
    for stop in stops:
        tokens = [ops.convert_to_tensor(a[:, start:stop]) for a in x]
        output, state = stretch(name, window)(*tokens, state)
        outputs.append(h.to_numpy(output))
        start = stop
    return np.concatenate(outputs, axis=1), state


@pytest.mark.parametrize("side", ["query", "key", "value"])
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("name", first_on_jax(["favorpp", "polysketch"]))
def test_a_state_remembers(name, window, side):
    x, stops = h.problem(), (6, 12, 13, 14, 30, 31)
    expected, _ = steps(name, x, stops, window)
    assert np.all(np.isfinite(expected))
    heads = GROUPS if side == "query" else 1
    for token, content in ((9, np.nan), (12, np.inf), (20, -np.inf)):
        changed = x._replace(**{side: getattr(x, side).copy()})
        getattr(changed, side)[1, token, heads, 3] = content
        actual, _ = steps(name, changed, stops, window)
        lost = np.zeros(actual.shape, bool)
        if side == "query":
            lost[1, token, GROUPS] = True
        else:
            lost[1, token:, GROUPS:] = True
        np.testing.assert_array_equal(np.isnan(actual), lost)
        h.assert_same(actual[~lost], expected[~lost])


def test_a_state_of_another_sequence_remembers():
    x = h.problem()
    x.key[1, 9, 1, 3] = np.nan
    tokens = list(map(ops.convert_to_tensor, x))
    call = Attention(*tokens, AttentionMask(), 0.2, h.build("favorpp"), Options())
    for state in (None, looked_up(call)[1]):
        lost = np.isnan(h.to_numpy(looked_up(call, state)[0]))
        expected = np.zeros(lost.shape, bool)
        expected[1, :, GROUPS:] = True
        np.testing.assert_array_equal(lost, expected)

"""One entry that is not finite: a NaN in every row that sees it, nothing elsewhere."""

import functools

import numpy as np
import pytest
from keras import ops

from keras_rfattn.ops import (
    Local,
    bidirectional,
    causal,
    extend_local_state,
    extend_state,
    init_local_state,
    init_state,
    local_attention,
    quadratic,
    read_local_state,
    read_state,
)
from keras_rfattn.ops.features import map_features
from tests import helpers as h

CONTENTS = (np.nan, np.inf, -np.inf)
WINDOW = 8
GROUPS = h.HEADS // h.KV_HEADS
MASK = np.ones((h.BATCH, h.LENGTH), bool)
MASK[0, :3], MASK[1, 30:] = False, False


def windowed(sliding, is_causal, window=WINDOW):
    def algorithm(query, key, value, mask, tokens, kernel):
        local = Local(*tokens, kernel, window, sliding)
        return local_attention(query, key, value, local, mask, is_causal)

    return algorithm


def recurrent(query, key, value, mask, tokens, kernel):
    """The first 20 tokens are the state's, and every query sees them all."""
    first = [None if a is None else a[:, :20] for a in key]
    state = init_state(
        h.BATCH, h.KV_HEADS, key.width, h.VALUE_DIM, key.log_scale.shape[-1]
    )
    key = type(key)(*first)
    state = extend_state(state, key, value[:, :20], mask[:, :20])
    return read_state(state, query)


def plain(function, **options):
    return lambda query, key, value, mask, tokens, kernel: function(
        query, key, value, mask, **options
    )


# Name: (algorithm, is causal, maps it takes).
ALGORITHMS = {
    "causal": (plain(causal, block_size=h.BLOCK), True, h.NAMES),
    "bidirectional": (plain(bidirectional), False, h.NAMES),
    "quadratic": (plain(quadratic), False, h.FORMS),
    "quadratic causal": (plain(quadratic, causal=True), True, h.FORMS),
    "recurrent": (recurrent, False, h.NAMES),
    "window": (windowed(False, False), False, h.WINDOWED),
    "sliding window": (windowed(True, False), False, h.FORMS),
    "window causal": (windowed(False, True), True, h.WINDOWED),
    "window of all": (windowed(False, False, h.LENGTH), False, h.FORMS),
    "window of all causal": (windowed(False, True, h.LENGTH), True, h.FORMS),
    "sliding window causal": (windowed(True, True), True, h.FORMS),
}
# The two that every map is tried with wherever a program costs more than it tells.
PLAIN = ("causal", "bidirectional")
CASES = [
    (name, algorithm)
    for algorithm, (_, _, names) in ALGORITHMS.items()
    for name in names
    if name in h.WINDOWED or "window" not in algorithm
]


def run(name, algorithm, x):
    feature_map = h.build(name)
    query, key, value, mask = (ops.convert_to_tensor(a) for a in (*x, MASK))
    query, key = feature_map.prepare(query, key)
    features = h.featurize(feature_map, query, key)
    call = program(algorithm, feature_map.exact_kernel)
    return h.to_numpy(call(*features, value, mask, (query, key)))


@functools.cache
def program(algorithm, kernel):
    """One for all maps of a form."""
    return h.compiled(ALGORITHMS[algorithm][0], kernel=kernel)


def sees(algorithm, side, at):
    """`(B, T, N)`: which rows see the entry at `(batch, token, head)`."""
    batch, token, head = at
    rows = np.zeros((h.BATCH, h.LENGTH, h.HEADS), bool)
    if side == "query":
        rows[at] = True
        return rows
    heads = slice(head * GROUPS, (head + 1) * GROUPS)
    first = token if ALGORITHMS[algorithm][1] else 0
    known = token < 20 or algorithm != "recurrent"
    rows[batch, first:, heads] = MASK[batch, token] and known
    return rows


@pytest.mark.parametrize(("name", "algorithm"), CASES)
def test_what_sees_it_is_nan_and_nothing_else_changes(name, algorithm):
    x = h.problem()
    expected = run(name, algorithm, x)
    assert np.all(np.isfinite(expected))
    places = [("query", 13, 3), ("key", 13, 1), ("key", 4, 0), ("value", 21, 1)]
    places += [("key", 1, 0), ("value", 16, 0)]
    for i, (side, token, head) in enumerate(places):
        content, entry, batch = CONTENTS[i % 3], 5 * i % h.VALUE_DIM, i % 2
        at = (batch, token, head)
        changed = x._replace(**{side: getattr(x, side).copy()})
        getattr(changed, side)[(*at, entry)] = content
        actual = run(name, algorithm, changed)
        rows = sees(algorithm, side, at)
        assert not np.any(np.isfinite(actual[rows])), (side, at, content)
        h.assert_same(actual[~rows], expected[~rows])


@pytest.mark.parametrize(
    ("name", "algorithm"), [x for x in CASES if x[1] in PLAIN or x[0] in h.FORMS]
)
def test_large_finite_numbers_stay_finite(name, algorithm):
    x = h.problem()
    for size in (1e30, 3e38):
        query, key = x.query.copy(), x.key.copy()
        query[0, 13, 3, 5], key[1, 13, 1, 2] = size, -size
        query[1, 2], key[0, 21] = size, size
        output = run(name, algorithm, x._replace(query=query, key=key))
        assert np.all(np.isfinite(output))
        assert np.any(output != 0)


@pytest.mark.parametrize("side", ["query", "key", "value"])
@pytest.mark.parametrize("name", h.FORMS)
def test_gradients_know_too(name, side):
    # Else an optimizer would go on as if nothing were wrong.
    x = h.problem()
    getattr(x, side)[1, 9, 1, 3] = np.nan
    call = h.attention(h.build(name), causal, block_size=h.BLOCK)
    found = h.gradients(lambda *a: ops.square(call(*a)), *x)
    assert not np.all(np.isfinite(np.concatenate([g.ravel() for g in found])))


def span(features, start, stop):
    return map_features(lambda x: x[:, start:stop], features)


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", h.FORMS)
def test_a_state_remembers(name, content):
    x, feature_map, cut = h.problem(), h.build(name), 20
    x.key[1, 9, 1, 3] = content
    features = h.featurize(feature_map, x.query, x.key)
    value = ops.convert_to_tensor(x.value)
    early, late = (
        [span(y, *ends) for y in (*features, value)] for ends in ((0, cut), (cut, None))
    )
    _, state = causal(*early, block_size=h.BLOCK, return_state=True)
    actual = h.to_numpy(causal(*late, block_size=h.BLOCK, state=state))
    expected = h.to_numpy(causal(*features, value, block_size=h.BLOCK))[:, cut:]
    lost = np.zeros(actual.shape, bool)
    lost[1, :, GROUPS:] = True
    np.testing.assert_array_equal(np.isnan(actual), lost)
    h.assert_close(actual[~lost], expected[~lost], 1e-4)


@pytest.mark.full
@pytest.mark.parametrize("side", ["key", "value"])
def test_a_windowed_state_remembers(side):
    x, feature_map = h.problem(), h.build("favorpp")
    getattr(x, side)[1, 4, 1, 3] = np.inf
    query, key, value = (ops.convert_to_tensor(a) for a in x)
    features = h.featurize(feature_map, query, key)
    state = init_local_state(
        h.BATCH, h.KV_HEADS, h.NUM_FEATURES, h.VALUE_DIM, h.HEAD_DIM, WINDOW
    )
    for stop in (3, 7, 30):
        start = int(state.position[0])
        tokens = [span(y, start, stop) for y in features]
        state = extend_local_state(
            state, tokens[1], value[:, start:stop], key[:, start:stop]
        )
        last = span(tokens[0], -1, None)
        output = read_local_state(
            state, last, query[:, stop - 1 : stop], feature_map.exact_kernel
        )
        lost = np.zeros(output.shape, bool)
        lost[1, :, GROUPS:] = stop > 4
        np.testing.assert_array_equal(~np.isfinite(h.to_numpy(output)), lost)

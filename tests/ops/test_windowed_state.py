"""The windowed state, token by token, against the parallel pass."""

import itertools

import numpy as np
import pytest
from keras import ops

from keras_rfattn.ops.windowed_chunk import local_chunk
from keras_rfattn.ops.windowed_state import (
    extend_local_state,
    init_local_state,
    read_local_state,
)
from keras_rfattn.ops.windows import Local, local_attention
from tests import helpers as h
from tests.feature_maps.cases import case
from tests.marks import ONE_BACKEND, SLOW_ON_JAX

WINDOW, SPLIT = 7, 17
NAMES = ("signed", "positive", "squared")
by_default = SLOW_ON_JAX, (), SLOW_ON_JAX
# Every map with a window of its own and with two, under one mask and under the other.
CASES = [
    pytest.param(
        name, kind, sliding, marks=ONE_BACKEND if kind == "left" else by_default[i]
    )
    for i, name in enumerate(NAMES)
    for kind, sliding in zip(
        ("left", "scattered"), (i % 2 == 0, i % 2 == 1), strict=True
    )
]


def setup(name, kind):
    """Map, arrays of `(query features, key features, value, query, key)`, mask."""
    feature_map, x = h.build(name), h.problem()
    side = feature_map.default_scale(h.HEAD_DIM) ** 0.5 * case(name).size
    query, key = (ops.convert_to_tensor(side * a) for a in (x.query, x.key))
    features = h.featurized(feature_map, query, key, causal=True)
    value = ops.convert_to_tensor(x.value)
    return feature_map, (*features, value, query, key), h.padding_masks()[kind]


def cut(arrays, start, stop):
    features = [x.of_tokens(lambda y: y[:, start:stop]) for x in arrays[:2]]
    return *features, *(x[:, start:stop] for x in arrays[2:])


def empty(feature_map, sliding):
    return init_local_state(
        h.BATCH,
        h.KV_HEADS,
        feature_map.output_dim,
        h.VALUE_DIM,
        h.HEAD_DIM,
        WINDOW,
        sliding,
        feature_map.features_per_scale,
    )


def extended(state, arrays, mask):
    _, features, value, _, key = arrays
    call = h.compiled(extend_local_state)
    return call(state, features, value, key, ops.convert_to_tensor(mask))


def steps(state, feature_map, arrays, mask, start):
    """Outputs of tokens `start`, `start + 1`, ..., fed one by one."""
    read = h.compiled(read_local_state, kernel=feature_map.exact_kernel)
    outputs = []
    for t in range(start, mask.shape[1]):
        now = cut(arrays, t, t + 1)
        state = extended(state, now, mask[:, t : t + 1])
        outputs.append(h.to_numpy(read(state, now[0], now[3])))
    return np.concatenate(outputs, axis=1), state


def parallel(feature_map, arrays, mask, sliding):
    query_features, key_features, value, query, key = arrays
    where = Local(query, key, feature_map.exact_kernel, WINDOW, sliding)
    output = local_attention(
        query_features, key_features, value, where, ops.convert_to_tensor(mask), True
    )
    return h.to_numpy(output)


@pytest.mark.parametrize(("name", "kind", "sliding"), CASES)
def test_token_by_token_is_the_parallel_pass(name, kind, sliding):
    feature_map, arrays, mask = setup(name, kind)
    output, state = steps(empty(feature_map, sliding), feature_map, arrays, mask, 0)
    h.assert_close(output, parallel(feature_map, arrays, mask, sliding))
    h.assert_same(state.position, h.LENGTH - mask.argmax(axis=1))


@pytest.mark.parametrize(("name", "kind", "sliding"), CASES)
def test_prefill_then_steps(name, kind, sliding):
    feature_map, arrays, mask = setup(name, kind)
    state = empty(feature_map, sliding)
    state = extended(state, cut(arrays, 0, SPLIT), mask[:, :SPLIT])
    output, last = steps(state, feature_map, arrays, mask, SPLIT)
    expected = parallel(feature_map, arrays, mask, sliding)[:, SPLIT:]
    h.assert_close(output, expected)
    whole = extended(empty(feature_map, sliding), arrays, mask)
    for a, b in zip(last, whole, strict=True):
        a, b = h.to_numpy(a), h.to_numpy(b)
        h.assert_close(a, b, 1e-4) if a.dtype.kind == "f" else h.assert_same(a, b)


@pytest.mark.parametrize(("name", "kind", "sliding"), CASES)
def test_chunks_are_the_parallel_pass(name, kind, sliding):
    feature_map, arrays, mask = setup(name, kind)
    query_features, key_features, value, query, key = arrays

    def features(query, key, sink, position):
        return feature_map.query_features(query), feature_map.key_features(key)

    def chunk(state, value, query, key, seen, is_empty):
        local = Local(query, key, feature_map.exact_kernel, WINDOW, sliding)
        return local_chunk(state, features, value, local, seen, is_empty=is_empty)

    state, outputs = empty(feature_map, sliding), []
    first, further = (h.compiled(chunk, is_empty=x) for x in (True, False))
    for start, stop in itertools.pairwise((0, *range(SPLIT, h.LENGTH + 1, 4))):
        seen = ops.convert_to_tensor(mask[:, start:stop])
        call = further if start else first
        output, state = call(state, *cut(arrays, start, stop)[2:], seen)
        outputs.append(h.to_numpy(output))
    expected = parallel(feature_map, arrays, mask, sliding)
    h.assert_close(np.concatenate(outputs, axis=1), expected)
    whole = extended(empty(feature_map, sliding), arrays, mask)
    # What a slot without a token holds nobody reads.
    state, whole = (
        x._replace(**{
            name: ops.where(x.visible[:, None, :, None], getattr(x, name), 0)
            for name in ("key", "value")
        })
        for x in (state, whole)
    )  # fmt: skip
    for a, b in zip(state, whole, strict=True):
        a, b = h.to_numpy(a), h.to_numpy(b)
        h.assert_close(a, b, 1e-4) if a.dtype.kind == "f" else h.assert_same(a, b)


def test_content_of_hidden_tokens_changes_nothing():
    feature_map, arrays, mask = setup("favorpp", "scattered")
    spoiled = [
        arrays[1].of_tokens(
            lambda x: ops.where(mask[..., None, None], x, float("nan"))
        ),
        *(ops.where(mask[..., None, None], x, float("nan")) for x in arrays[2:]),
    ]
    a, b = (
        extended(empty(feature_map, True), x, mask)
        for x in (arrays, (arrays[0], *spoiled))
    )
    for x, y in zip(a, b, strict=True):
        h.assert_same(h.to_numpy(x), h.to_numpy(y))


def test_size_depends_on_the_window_alone():
    feature_map, arrays, mask = setup("favorpp", "full")
    start = empty(feature_map, True)
    for x, y in zip(start, extended(start, arrays, mask), strict=True):
        assert tuple(x.shape) == tuple(y.shape)

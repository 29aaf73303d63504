"""The windowed state, token by token, against the parallel pass."""

import itertools

import keras
import numpy as np
import pytest
from keras import ops

from keras_rfattn.ops.near import chunk, extend_near, read_near, turn
from keras_rfattn.ops.state import Near, init_state
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


def local_of(feature_map, query, key, sliding):
    return Local(query, key, feature_map.exact_kernel, WINDOW, sliding)


def empty(feature_map, sliding):
    return init_state(
        h.BATCH, h.KV_HEADS, feature_map.output_dim, h.VALUE_DIM,
        feature_map.features_per_scale, h.HEAD_DIM,
        local_of(feature_map, None, None, sliding),
    )  # fmt: skip


def chunks(feature_map, sliding, **options):
    """`(state, value, query, key, mask) -> output, state`, compiled."""

    def function(state, value, query, key, seen):
        local = local_of(feature_map, query, key, sliding)
        return chunk(state, feature_map, value, local, seen, **options)

    return h.compiled(function)


def extended(state, feature_map, arrays, mask, sliding):
    """The state after tokens, whose output is not computed."""
    call = chunks(feature_map, sliding, attends=False)
    return call(state, *arrays[2:], ops.convert_to_tensor(mask))[1]


def steps(state, feature_map, arrays, mask, start, sliding):
    """Outputs of tokens `start`, `start + 1`, ..., fed one by one."""

    def step(state, features, value, query, key, seen):
        local = local_of(feature_map, query, key, sliding)
        moves = turn(state, local, seen)
        state = extend_near(state, moves, feature_map, value, local)
        return read_near(state, moves, features, local), state

    call, outputs = h.compiled(step), []
    for t in range(start, mask.shape[1]):
        features, _, *tokens = cut(arrays, t, t + 1)
        seen = ops.convert_to_tensor(mask[:, t : t + 1])
        output, state = call(state, features, *tokens, seen)
        outputs.append(h.to_numpy(output))
    return np.concatenate(outputs, axis=1), state


def assert_states_equal(a, b):
    """States must be equal in all that a reader uses."""
    a, b = map(readable, (a, b))
    for x, y in zip(keras.tree.flatten(a), keras.tree.flatten(b), strict=True):
        x, y = h.to_numpy(x), h.to_numpy(y)
        h.assert_close(x, y, 1e-4) if x.dtype.kind == "f" else h.assert_same(x, y)


def readable(state):
    """A state with zeros in the slots of the ring that no later token reads."""
    near, size = state.near, state.near.visible.shape[1]
    last = ops.expand_dims(state.position, 1) - 1
    position = last - (last - ops.arange(size, dtype="int32")) % size
    first = (last // WINDOW - size // WINDOW + 1) * WINDOW
    visible = near.visible & (position >= ops.maximum(first, 0))
    shown = visible[:, None, :, None]
    key, value = (ops.where(shown, x, 0) for x in (near.key, near.value))
    return state._replace(near=Near(key, value, visible))


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
    start = empty(feature_map, sliding)
    output, state = steps(start, feature_map, arrays, mask, 0, sliding)
    # Rows of a signed map are ill-conditioned.
    rtol = 1e-4 if name == "signed" else 1e-5
    h.assert_close(output, parallel(feature_map, arrays, mask, sliding), rtol)
    h.assert_same(state.position, h.LENGTH - mask.argmax(axis=1))


@pytest.mark.parametrize(("name", "kind", "sliding"), CASES)
def test_prefill_then_steps(name, kind, sliding):
    feature_map, arrays, mask = setup(name, kind)
    start = empty(feature_map, sliding)
    first = cut(arrays, 0, SPLIT)
    state = extended(start, feature_map, first, mask[:, :SPLIT], sliding)
    output, last = steps(state, feature_map, arrays, mask, SPLIT, sliding)
    expected = parallel(feature_map, arrays, mask, sliding)[:, SPLIT:]
    h.assert_close(output, expected)
    assert_states_equal(last, extended(start, feature_map, arrays, mask, sliding))


@pytest.mark.parametrize(("name", "kind", "sliding"), CASES)
def test_chunks_are_the_parallel_pass(name, kind, sliding):
    feature_map, arrays, mask = setup(name, kind)
    state, outputs = empty(feature_map, sliding), []
    first, further = (chunks(feature_map, sliding, is_empty=x) for x in (True, False))
    for start, stop in itertools.pairwise((0, *range(SPLIT, h.LENGTH + 1, 4))):
        seen = ops.convert_to_tensor(mask[:, start:stop])
        call = further if start else first
        output, state = call(state, *cut(arrays, start, stop)[2:], seen)
        outputs.append(h.to_numpy(output))
    expected = parallel(feature_map, arrays, mask, sliding)
    h.assert_close(np.concatenate(outputs, axis=1), expected)
    whole = extended(empty(feature_map, sliding), feature_map, arrays, mask, sliding)
    assert_states_equal(state, whole)


def test_content_of_hidden_tokens_changes_nothing():
    feature_map, arrays, mask = setup("favorpp", "scattered")
    spoiled = [ops.where(mask[..., None, None], x, float("nan")) for x in arrays[2:]]
    a, b = (
        extended(empty(feature_map, True), feature_map, x, mask, True)
        for x in (arrays, (*arrays[:2], *spoiled))
    )
    for x, y in zip(keras.tree.flatten(a), keras.tree.flatten(b), strict=True):
        h.assert_same(h.to_numpy(x), h.to_numpy(y))


def test_size_depends_on_the_window_alone():
    feature_map, arrays, mask = setup("favorpp", "full")
    start = empty(feature_map, True)
    after = extended(start, feature_map, arrays, mask, True)
    shapes = (
        [tuple(x.shape) for x in keras.tree.flatten(state)] for state in (start, after)
    )
    assert len(set(map(tuple, shapes))) == 1

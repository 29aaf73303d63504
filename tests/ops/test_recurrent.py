import keras
import numpy as np
import pytest
from keras import ops

from keras_rfattn.ops import causal, extend_state, init_state, read_state
from tests import helpers as h

SPLIT = 20
MASKS = ("left", "full", "scattered")


def setup(name, kind="full", size=1.0):
    feature_map, x = h.build(name), h.problem(size=size)
    features = h.featurize(feature_map, x.query, x.key)
    mask = h.padding_masks()[kind]
    return feature_map, features, ops.convert_to_tensor(x.value), mask


def cut(features, start, stop):
    return features.of_tokens(lambda x: x[:, start:stop])


def steps(state, features, value, mask, start):
    """Outputs of tokens `start`, `start + 1`, ..., fed one by one."""
    query, key = features
    extend, read = h.compiled(extend_state), h.compiled(read_state)
    outputs = []
    for t in range(start, value.shape[1]):
        now = slice(t, t + 1)
        visible = ops.convert_to_tensor(mask[:, now])
        state = extend(state, cut(key, t, t + 1), value[:, now], visible)
        outputs.append(h.to_numpy(read(state, cut(query, t, t + 1))))
    return np.concatenate(outputs, axis=1), state


def empty(feature_map):
    return init_state(
        h.BATCH,
        h.KV_HEADS,
        feature_map.output_dim,
        h.VALUE_DIM,
        feature_map.features_per_scale,
    )


@pytest.mark.parametrize(("name", "kind"), h.over(MASKS))
def test_token_by_token_is_the_definition(name, kind):
    feature_map, features, value, mask = setup(name, kind)
    output, state = steps(empty(feature_map), features, value, mask, 0)
    h.assert_matches(feature_map, output, h.reference(*features, value, mask))
    h.assert_same(state.position, mask.sum(axis=1))


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", h.FORMS)
def test_prefill_then_steps(name, kind):
    feature_map, features, value, mask = setup(name, kind)
    prefill = h.compiled(causal, block_size=h.BLOCK, return_state=True)
    first, state = prefill(
        *(cut(x, 0, SPLIT) for x in features),
        value[:, :SPLIT],
        ops.convert_to_tensor(mask[:, :SPLIT]),
    )
    rest, state = steps(state, features, value, mask, SPLIT)
    output = np.concatenate([h.to_numpy(first), rest], axis=1)
    h.assert_matches(feature_map, output, h.reference(*features, value, mask))
    h.assert_same(state.position, mask.sum(axis=1))


@pytest.mark.full
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", h.FORMS)
def test_split_and_resume(name, kind):
    feature_map, features, value, mask = setup(name, kind)
    call = h.compiled(causal, block_size=h.BLOCK, return_state=True)
    outputs, state = [], empty(feature_map)
    for part in (slice(0, SPLIT), slice(SPLIT, None)):
        output, state = call(
            *(cut(x, part.start, part.stop) for x in features),
            value[:, part],
            ops.convert_to_tensor(mask[:, part]),
            state=state,
        )
        outputs.append(h.to_numpy(output))
    output = np.concatenate(outputs, axis=1)
    h.assert_matches(feature_map, output, h.reference(*features, value, mask))

    _, whole = h.compiled(causal, block_size=h.BLOCK, return_state=True)(
        *features, value, ops.convert_to_tensor(mask)
    )
    h.assert_same(state.position, whole.position)
    for actual, expected in zip(state.far, whole.far, strict=True):
        h.assert_close(actual, expected)


def test_gradients_cross_the_split():
    feature_map, x = h.build("favorplus"), h.problem()

    def resumed(query, key, value):
        features = h.featurize(feature_map, query, key)
        first = [cut(f, 0, SPLIT) for f in features]
        rest = [cut(f, SPLIT, None) for f in features]
        call = h.compiled(causal, block_size=h.BLOCK, return_state=True)
        a, state = call(*first, value[:, :SPLIT])
        b, _ = call(*rest, value[:, SPLIT:], state=state)
        return ops.concatenate([a, b], axis=1)

    actual = h.gradients(resumed, *x)
    expected = h.gradients(h.attention(feature_map, causal, block_size=h.BLOCK), *x)
    h.assert_gradients_close(actual, expected, h.gradient_rtol(feature_map))


@pytest.mark.parametrize("name", h.FORMS)
def test_many_tokens_at_once_are_one_by_one(name):
    feature_map, (query, key), value, mask = setup(name, "scattered")
    state = extend_state(empty(feature_map), key, value, ops.convert_to_tensor(mask))
    _, expected = steps(empty(feature_map), (query, key), value, mask, 0)
    for a, e in zip(state.far, expected.far, strict=True):
        h.assert_close(a, e)
    h.assert_same(state.position, expected.position)


@pytest.mark.full
@pytest.mark.parametrize("name", h.FORMS)
def test_size_does_not_depend_on_length(name):
    feature_map = h.build(name)
    start = empty(feature_map)
    for length in (1, h.LENGTH):
        x = h.problem(length=length)
        _, key = h.featurize(feature_map, x.query, x.key)
        state = extend_state(start, key, ops.convert_to_tensor(x.value))
        leaves = [keras.tree.flatten(x) for x in (state, start)]
        assert len({tuple(tuple(a.shape) for a in x) for x in leaves}) == 1
        for a, b in zip(*leaves, strict=True):
            assert a.shape[0] == h.BATCH
            assert keras.backend.standardize_dtype(
                a.dtype
            ) == keras.backend.standardize_dtype(b.dtype)


@pytest.mark.parametrize("name", h.FORMS)
def test_hidden_tokens_leave_no_trace(name):
    feature_map, (query, key), value, mask = setup(name, "middle")
    plain = extend_state(empty(feature_map), key, value, ops.convert_to_tensor(mask))
    x, hidden = h.problem(), ~mask[:, :, None, None]
    _, key = h.featurize(
        feature_map, x.query, np.where(hidden, np.float32("nan"), x.key)
    )
    value = np.where(hidden, np.float32("nan"), x.value)
    state = extend_state(
        empty(feature_map), key, ops.convert_to_tensor(value),
        ops.convert_to_tensor(mask),
    )  # fmt: skip
    leaves = map(keras.tree.flatten, (state, plain))
    for a, e in zip(*leaves, strict=True):
        h.assert_same(a, e)


def test_empty_state_reads_zero():
    feature_map, (query, _), _, _ = setup("favorplus")
    output = h.to_numpy(read_state(empty(feature_map), query))
    np.testing.assert_array_equal(output, 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", h.AVERAGING_FORMS)
def test_narrow_values(name, dtype):
    # Queries near keys, values off 0: else a signed map's rows could not tell its
    # output from 0.
    feature_map, features, value, _ = setup(name, size=0.2)
    value = value + 2
    state = extend_state(empty(feature_map), features[1], ops.cast(value, dtype))
    for a in state.far:
        assert keras.backend.standardize_dtype(a.dtype) == "float32"
    output = read_state(state, features[0], dtype)
    assert keras.backend.standardize_dtype(output.dtype) == dtype
    expected = h.reference(*features, value, causal=False)
    h.assert_matches(feature_map, output, expected, h.NARROW[dtype])

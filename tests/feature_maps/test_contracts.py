"""Every feature map meets every algorithm: the contracts that layers rely on.

`test_laws.py` has the laws of a map alone (shapes, positivity, unbiasedness, seeds,
dtypes, saving), and `tests/ops` the behaviour of algorithms, on synthetic features.
"""

import functools

import keras
import numpy as np
import pytest
from keras import ops

from keras_rfattn import feature_maps
from keras_rfattn.layers import MultiHeadAttention
from keras_rfattn.ops import (
    bidirectional,
    causal,
    extend_state,
    init_state,
    quadratic,
    read_state,
)
from tests import helpers as h
from tests import marks
from tests.contract import contract
from tests.feature_maps.cases import case


def token_by_token(query, key, value, mask):
    """Causal attention by the recurrent state, from features."""
    state = init_state(h.BATCH, h.KV_HEADS, key.width, h.VALUE_DIM, key.scale_width)
    extend, read = h.compiled(extend_state), h.compiled(read_state)
    outputs = []
    for t in range(value.shape[1]):
        now = slice(t, t + 1)
        queries, keys = (
            features.of_tokens(lambda x: x[:, now])  # noqa: B023
            for features in (query, key)
        )
        state = extend(state, keys, value[:, now], mask[:, now])
        outputs.append(read(state, queries))
    return ops.concatenate(outputs, axis=1)


PARALLEL = {
    "bidirectional": (bidirectional, {}),
    "causal": (causal, {"block_size": h.BLOCK}),
}
ALGORITHMS = {
    "quadratic": h.compiled(quadratic),
    **{name: h.compiled(call, **options) for name, (call, options) in PARALLEL.items()},
    "token by token": token_by_token,
}
CAUSAL = ("causal", "token by token")
NOT_PARALLEL = ("quadratic", "token by token")
each_map = pytest.mark.parametrize("name", h.EACH_MAP)
own_maps = pytest.mark.parametrize("name", marks.own_maps(h.NAMES))
each_parallel = pytest.mark.parametrize("algorithm", PARALLEL)


def parallel(name, algorithm):
    """`(query, key, value, key_mask=None) -> output` with the map inside."""
    function, options = PARALLEL[algorithm]
    return h.attention(h.build(name), function, **options)


def disturbed(array, where, content=100.0):
    """`array` with other numbers at an index."""
    array = array.copy()
    array[where] = array[where] * content if content == 100 else np.float32(content)
    return array


@pytest.mark.parametrize(
    "algorithm",
    [*PARALLEL, *(pytest.param(x, marks=marks.SLOW_ON_JAX) for x in NOT_PARALLEL)],
)
@each_map
def test_algorithms_agree_with_the_definition(name, algorithm):
    feature_map, x = h.build(name), h.problem()
    mask = h.padding_masks()["scattered"]
    features = h.featurize(feature_map, x.query, x.key)
    output = ALGORITHMS[algorithm](
        *features, ops.convert_to_tensor(x.value), ops.convert_to_tensor(mask)
    )
    expected = h.reference(*features, x.value, mask, causal=algorithm in CAUSAL)
    with contract(name, algorithm):
        h.assert_matches(feature_map, output, expected)


@pytest.mark.parametrize("algorithm", marks.first_on_jax(["causal", "bidirectional"]))
@each_map
def test_gradients_agree_with_the_definition(name, algorithm):
    feature_map, x = h.build(name), h.problem()
    mask = h.padding_masks()["left"]
    definition = h.attention(feature_map, quadratic, causal=algorithm in CAUSAL)
    actual, expected = (
        h.gradients(lambda *a: call(*a, mask), *x)  # noqa: B023
        for call in (parallel(name, algorithm), definition)
    )
    with contract(name, algorithm):
        h.assert_gradients_close(actual, expected, h.gradient_rtol(feature_map))


@each_parallel
@each_map
def test_hidden_keys_may_hold_anything(name, algorithm):
    x, mask = h.problem(), h.padding_masks()["middle"]
    call = parallel(name, algorithm)
    hidden = ~mask[:, :, None, None]
    key, value = (np.where(hidden, np.float32(1e12), a) for a in (x.key, x.value))
    with contract(name, algorithm):
        h.assert_same(call(x.query, key, value, mask), call(*x, mask))


@pytest.mark.parametrize("content", [1e12, 100.0])
@each_map
def test_the_future_changes_nothing(name, content):
    x, now = h.problem(), 15
    call = parallel(name, "causal")
    later = (slice(None), slice(now, None))
    expected = h.to_numpy(call(*x))
    actual = h.to_numpy(call(*(disturbed(a, later, content) for a in x)))
    with contract(name, "causal"):
        h.assert_same(actual[:, :now], expected[:, :now])
        # Else the algorithm might never look at what was changed.
        assert not np.array_equal(actual[:, now:], expected[:, now:])


@own_maps
def test_the_future_changes_no_gradient(name):
    x, now = h.problem(), 21
    call = parallel(name, "causal")
    later = (slice(None), slice(now, None))
    expected, actual = (
        h.gradients(lambda *a: call(*a)[:, :now], *arrays)
        for arrays in (x, [disturbed(a, later) for a in x])
    )
    with contract(name, "causal"):
        for a, e in zip(actual, expected, strict=True):
            h.assert_same(a[:, :now], e[:, :now])
            assert not np.any(a[:, now:]), "a future token has a gradient"


@each_parallel
@each_map
def test_sequences_and_heads_are_strangers(name, algorithm):
    x = h.problem()
    groups = h.HEADS // h.KV_HEADS
    function, options = PARALLEL[algorithm]

    def run(query, key, value):
        # Bound to the sequence, where the algorithm allows it.
        features = h.featurize(h.build(name), query, key, algorithm in CAUSAL)
        call = h.compiled(function, **options)
        return h.to_numpy(call(*features, ops.convert_to_tensor(value)))

    expected = run(*x)
    row = run(*(disturbed(a, (0,), 1e12) for a in x))
    queries = (slice(None), slice(None), slice(0, groups))
    keys = (slice(None), slice(None), slice(0, 1))
    head = run(
        disturbed(x.query, queries, 1e12),
        disturbed(x.key, keys, 1e12),
        disturbed(x.value, keys, 1e12),
    )
    with contract(name, algorithm):
        h.assert_same(row[1:], expected[1:])
        h.assert_same(head[:, :, groups:], expected[:, :, groups:])


# Times the square root of the scale and squared, logits of up to 10⁴.
LARGE = 60.0
# Exponents are then of 10⁴ as well, where float32 numbers lie 10⁻³ apart.
POSITIVE_RTOL, SIGNED_RTOL = 3e-2, 2e-3


def clear_rows(output, expected, rtol):
    """The rows of a signed map that `rtol` tells from zeros: half of them at least."""
    rows = np.max(np.abs(expected.output), axis=-1)
    clear = rows > 3 * rtol * expected.size * expected.conditioning
    assert np.mean(clear) > 0.5
    return (
        h.to_numpy(output)[clear],
        expected.output[clear],
        expected.conditioning[clear],
        expected.size,
    )


@each_parallel
@each_map
def test_large_logits(name, algorithm):
    feature_map, x = h.build(name), h.problem(size=LARGE)
    mask = h.padding_masks()["scattered"]
    features = h.featurize(feature_map, x.query, x.key)
    output = parallel(name, algorithm)(*x, mask)
    expected = h.reference(*features, x.value, mask, causal=algorithm in CAUSAL)
    with contract(name, algorithm):
        if feature_map.is_positive:
            h.assert_close(output, expected.output, POSITIVE_RTOL)
        else:
            h.assert_rows_close(*clear_rows(output, expected, SIGNED_RTOL), SIGNED_RTOL)


@each_map
def test_large_logits_choose_among_keys(name):
    x = h.problem(size=LARGE)
    output = h.to_numpy(parallel(name, "causal")(*x))
    with contract(name, "causal"):
        is_softmax = feature_maps.class_of(name).kernel == "softmax"
        least = 0.5 if case(name).is_sharp and is_softmax else 0.2
        distance = h.distance_to_prefix_mean(output, x.value)
        assert distance > least, (
            f"with large logits, outputs must differ from the mean of the values by "
            f"more than {least}, relative to it, and differ by {distance:.2f}"
        )


@each_parallel
@own_maps
def test_gradients_of_large_logits_are_finite(name, algorithm):
    x = h.problem(size=LARGE / case(name).size)
    found = h.gradients(parallel(name, algorithm), *x)
    with contract(name, algorithm):
        for gradient in found:
            assert np.all(np.isfinite(gradient)), "a gradient is not finite"
        assert np.any(found[2] != 0), "no gradient reaches the values"


@pytest.mark.parametrize("dtype", marks.first(h.NARROW))
@each_parallel
@pytest.mark.parametrize("name", marks.own_maps(h.AVERAGING))
def test_narrow_values(name, algorithm, dtype):
    # Queries near keys, or a signed map's rows could not tell its output from 0.
    feature_map, x = h.build(name), h.problem(size=0.2)
    function, options = PARALLEL[algorithm]
    features = h.featurize(feature_map, x.query, x.key)
    mask = h.padding_masks()["left"]
    output = h.compiled(function, **options)(
        *features, ops.cast(x.value, dtype), ops.convert_to_tensor(mask)
    )
    expected = h.reference(*features, x.value, mask, causal=algorithm in CAUSAL)
    with contract(name, algorithm):
        assert keras.backend.standardize_dtype(output.dtype) == dtype
        h.assert_matches(feature_map, output, expected, h.NARROW[dtype])


@pytest.mark.parametrize("dtype", marks.first(h.NARROW))
@own_maps
def test_gradients_of_narrow_inputs(name, dtype):
    feature_map, x = h.build(name), h.problem()
    if not feature_map.is_positive:
        pytest.skip(f"{name} is signed: rounded denominators nearly vanish")
    call = parallel(name, "causal")
    narrow = [ops.cast(a, dtype) for a in x]
    actual = h.gradients(lambda *a: call(*a), *narrow)
    # From the same rounded numbers: what is measured is the arithmetic.
    expected = h.gradients(lambda *a: call(*a), *(h.to_numpy(a) for a in narrow))
    rtol = case(name).narrow * h.NARROW[dtype]
    with contract(name, "causal"):
        h.assert_gradients_close(actual, expected, rtol, all_clear=False)


@functools.cache
def layer(name, dtype=None):
    """A layer with the map, the same for equal arguments, and its input."""
    keras.utils.set_random_seed(0)
    # Few features of a signed map would leave little but noise.
    count = 256 if name in h.RANDOM else None
    made = MultiHeadAttention(
        2, 4, feature_map=name, num_features=count, seed=0, dtype=dtype
    )
    x = np.random.default_rng(0).normal(size=(2, 6, 8)).astype("float32")
    made.build(x.shape, x.shape)
    return made, x


@each_map
def test_padding_reaches_no_output_of_a_layer(name):
    attention, x = layer(name)
    mask = np.array([[1, 1, 1, 1, 0, 0], [0, 1, 1, 0, 1, 1]], bool)

    @h.one_program
    def masked(x):
        return attention(x, x, attention_mask=mask[:, None])

    expected = h.to_numpy(masked(ops.convert_to_tensor(x)))
    with contract(name, "layer"):
        for content in (100.0, 1e12, np.nan):
            # Padding among the queries too: it must not reach a statistic either.
            other = np.where(mask[..., None], x, np.float32(content))
            actual = h.to_numpy(masked(ops.convert_to_tensor(other)))
            h.assert_same(actual[mask], expected[mask])
        plain = h.one_program(lambda x: attention(x, x))
        without = h.to_numpy(plain(ops.convert_to_tensor(x)))
        assert np.max(np.abs(without - expected)) > 1e-4, "the mask changes nothing"


@own_maps
def test_a_layer_in_low_precision(name):
    wide, x = layer(name)
    low, _ = layer(name, "mixed_bfloat16")
    for a, b in zip(low.weights, wide.weights, strict=True):
        a.assign(ops.cast(ops.convert_to_tensor(b), a.dtype))
    x = ops.convert_to_tensor(x)
    actual, expected = (
        h.one_program(lambda x: call(x, x, use_causal_mask=True))(x)  # noqa: B023
        for call in (low, wide)
    )
    with contract(name, "layer"):
        h.assert_close(actual, expected, case(name).low_precision)
        zeros = h.one_program(lambda x: low(x, x))(0 * x)
        assert np.all(np.isfinite(h.to_numpy(zeros)))

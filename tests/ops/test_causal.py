import gc
import weakref

import keras
import numpy as np
import pytest
from keras import ops

from keras_rfattn import feature_maps
from keras_rfattn.ops import Features, causal, quadratic
from tests import helpers as h
from tests.marks import ONE_BACKEND, first_on_jax

BLOCKS = (3, 1, 16, 128)


def exact(feature_map, x, mask=None):
    features = h.featurize(feature_map, x.query, x.key)
    return h.reference(*features, x.value, mask)


@pytest.mark.parametrize(("name", "block_size"), h.over(BLOCKS))
def test_matches_the_definition(name, block_size):
    feature_map, x = h.build(name), h.problem()
    mask = h.padding_masks()["scattered"]
    actual = h.attention(feature_map, causal, block_size=block_size)(*x, mask)
    h.assert_matches(feature_map, actual, exact(feature_map, x, mask))


@pytest.mark.parametrize("name", h.FORMS)
def test_no_mask_is_a_mask_that_hides_nothing(name):
    feature_map, x = h.build(name), h.problem()
    features = h.featurize(feature_map, x.query, x.key)
    call = h.compiled(causal, block_size=h.BLOCK)
    actual = call(*features, ops.convert_to_tensor(x.value))
    h.assert_matches(feature_map, actual, exact(feature_map, x))


@pytest.mark.parametrize(
    ("name", "kind"), h.over(("left", "full", "right", "middle", "scattered"))
)
def test_padding_may_hold_anything(name, kind):
    feature_map, x = h.build(name), h.problem()
    mask = h.padding_masks()[kind]
    call = h.attention(feature_map, causal, block_size=h.BLOCK)
    output = call(*x, mask)
    h.assert_matches(feature_map, output, exact(feature_map, x, mask))
    blind = ~np.cumsum(mask, axis=1).astype(bool)
    np.testing.assert_array_equal(h.to_numpy(output)[blind], 0)
    for content in (np.nan, 1e30):
        hidden = ~mask[:, :, None, None]
        key = np.where(hidden, np.float32(content), x.key)
        value = np.where(hidden, np.float32(content), x.value)
        h.assert_same(call(x.query, key, value, mask), output)


@pytest.mark.parametrize(
    ("name", "length"),
    [(name, 33) for name in h.FORMS]
    + first_on_jax([(name, 1) for name in h.FORMS])
    + first_on_jax([("favorpp", 2), ("favorpp", 8)]),
)
def test_any_length(name, length):
    feature_map, x = h.build(name), h.problem(length=length)
    actual = h.attention(feature_map, causal, block_size=h.BLOCK)(*x)
    h.assert_matches(feature_map, actual, exact(feature_map, x))


@pytest.mark.full
@pytest.mark.parametrize("name", h.FORMS)
def test_longer_than_a_default_block(name):
    feature_map, x = h.build(name), h.problem(length=150)
    actual = h.attention(feature_map, causal)(*x)
    h.assert_matches(feature_map, actual, exact(feature_map, x))


@pytest.mark.smoke
@pytest.mark.parametrize(("name", "block_size"), h.over([h.BLOCK, 16]))
def test_gradients_match_the_definition(name, block_size):
    feature_map, x = h.build(name), h.problem()
    mask = h.padding_masks()["left"]
    algorithms = {"block_size": block_size}, {"causal": True}
    actual, expected = (
        h.gradients(
            lambda *a: h.attention(feature_map, f, **o)(*a, mask),  # noqa: B023
            *x,
        )
        for f, o in zip((causal, quadratic), algorithms, strict=True)
    )
    h.assert_gradients_close(actual, expected, h.gradient_rtol(feature_map))


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["favorpp", pytest.param("favor", marks=pytest.mark.once)]
)
def test_exponents_are_the_same_as_features(name):
    # 40 tokens are three blocks, the last of them not full; 4 heads share 2.
    feature_map, x = h.build(name), h.problem(length=40)
    mask = h.padding_masks(40)["middle"]

    def exponents(query, key, value):
        features = h.featurized(feature_map, query, key, causal=True)
        return causal(*features, value, ops.convert_to_tensor(mask), 16)

    def in_memory(query, key, value):
        features = h.featurized(feature_map, query, key, causal=True)
        features = [x.dense() for x in features]
        return causal(*features, value, ops.convert_to_tensor(mask), 16)

    x = [0.3 * a for a in x]
    tensors = [ops.convert_to_tensor(a) for a in x]
    query, key, value = tensors
    features = h.featurized(feature_map, query, key, causal=True)
    wanted = h.reference(*features, value, mask)
    for call in (exponents, in_memory):
        h.assert_matches(feature_map, call(*tensors), wanted)
    found, expected = h.gradients(exponents, *x), h.gradients(in_memory, *x)
    h.assert_gradients_close(found, expected, h.gradient_rtol(feature_map))


def test_exponents_leave_the_map_free():
    x = h.problem(length=4)
    feature_map = feature_maps.get("favorplus", num_features=8, seed=0)
    feature_map.build(x.key.shape)
    query, key, value = (ops.convert_to_tensor(a) for a in x)

    def call(feature_map):
        features = feature_map.query_features(query), feature_map.key_features(key)
        return h.to_numpy(causal(*features, value))

    first = call(feature_map)
    feature_map.redraw()
    second = call(feature_map)
    # A program knows no weights, only where they come in.
    assert np.max(np.abs(first - second)) > 1e-3
    alive = weakref.ref(feature_map)
    del feature_map
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("name", h.FORMS)
def test_gradients_ignore_padding(name):
    feature_map, x = h.build(name), h.problem()
    mask = h.padding_masks()["middle"]
    call = h.attention(feature_map, causal, block_size=h.BLOCK)
    gradient = h.gradient_of(lambda *a: call(*a, mask))
    expected = gradient(*x)
    hidden = ~mask[:, :, None, None]
    value = np.where(hidden, np.float32("nan"), x.value)
    key = np.where(hidden, np.float32(1e4), x.key)
    actual = gradient(x.query, key, value)
    h.assert_gradients_close(actual, expected, h.gradient_rtol(feature_map))
    for a in actual[1:]:
        np.testing.assert_array_equal(np.where(hidden, a, 0), 0)


@pytest.mark.full
@pytest.mark.parametrize("name", h.FORMS)
def test_float64(name):
    with h.double_precision():
        feature_map, x = h.build(name), h.problem(dtype="float64")
        features = h.featurize(feature_map, x.query, x.key)
        mask = h.padding_masks()["scattered"]
        output = h.attention(feature_map, causal, block_size=h.BLOCK)(*x, mask)
        assert keras.backend.standardize_dtype(output.dtype) == "float64"
        expected = h.reference(*features, x.value, mask)
        h.assert_matches(feature_map, output, expected, rtol=1e-10)


@pytest.mark.parametrize("name", h.AVERAGING_FORMS)
def test_one_visible_key_is_its_value(name):
    feature_map, x = h.build(name), h.problem()
    mask = np.zeros((h.BATCH, h.LENGTH), bool)
    mask[0, 21], mask[1, 0] = True, True
    output = h.to_numpy(h.attention(feature_map, causal, block_size=h.BLOCK)(*x, mask))
    value = np.repeat(x.value, h.HEADS // h.KV_HEADS, axis=2)
    np.testing.assert_array_equal(output[0, :21], 0)
    expected = exact(feature_map, x, mask)
    for row, first in ((0, 21), (1, 0)):
        h.assert_rows_close(
            output[row, first:],
            np.broadcast_to(value[row, first], output[row, first:].shape),
            expected.conditioning[row, first:],
            expected.size,
        )


@pytest.mark.parametrize("block_size", [0, -1, 2.0, True, "16"])
def test_block_size_must_be_a_positive_integer(block_size):
    x = h.problem(length=2)
    features = h.featurize(h.build("elu"), x.query, x.key)
    with pytest.raises(ValueError, match="`block_size` must be a positive integer"):
        causal(*features, ops.convert_to_tensor(x.value), block_size=block_size)


@pytest.mark.parametrize("name", h.FORMS)
def test_prefix_mean_is_not_what_comes_out(name):
    # What an implementation with a common maximum and an epsilon collapses to.
    feature_map, x = h.build(name), h.problem(size=3.0)
    output = h.to_numpy(h.attention(feature_map, causal, block_size=h.BLOCK)(*x))
    assert h.distance_to_prefix_mean(output, x.value) > 0.2


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="of TensorFlow")
@pytest.mark.parametrize(
    "name", ["favor", pytest.param("favorplus", marks=ONE_BACKEND)]
)
def test_unknown_length_in_a_graph(name):
    import tensorflow as tf

    feature_map = h.build(name)
    x = h.problem(length=1)
    specs = [tf.TensorSpec([None, None, *a.shape[2:]]) for a in x]
    specs.append(tf.TensorSpec([None, None], "bool"))
    call = h.attention(feature_map, causal, block_size=h.BLOCK)

    @tf.function(input_signature=specs)
    def graph(query, key, value, mask):
        with tf.GradientTape() as tape:
            tape.watch((query, key, value))
            output = call(query, key, value, mask)
            loss = tf.reduce_sum(tf.sin(output))
        return output, tape.gradient(loss, (query, key, value))

    for length in (1, 16, 37):
        x = h.problem(length=length)
        mask = np.ones((h.BATCH, length), bool)
        mask[0, : length // 2] = False
        output, found = graph(*x, mask)
        h.assert_matches(feature_map, output, exact(feature_map, x, mask))
        with tf.GradientTape() as tape:
            tensors = [tf.constant(a) for a in x]
            tape.watch(tensors)
            loss = tf.reduce_sum(tf.sin(call(*tensors, mask)))
        for a, e in zip(found, tape.gradient(loss, tensors), strict=True):
            # Of one token, queries and keys have no say.
            if np.any(h.to_numpy(e)) and length > 1:
                h.assert_close(a, e, h.gradient_rtol(feature_map))
    assert graph.experimental_get_tracing_count() == 1


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="of JAX")
def test_jit_changes_nothing():
    feature_map, x = h.build("favorplus"), h.problem()
    features = h.featurize(feature_map, x.query, x.key)
    expected = causal(*features, ops.convert_to_tensor(x.value), block_size=3)
    actual = h.attention(feature_map, causal, block_size=3)(*x)
    h.assert_close(actual, expected)


def test_scan_of_many_blocks():
    # Longer than any chunk the algorithm may cut a sequence into.
    length = 1100
    generator = np.random.default_rng(0)
    query, key = (
        Features(None, ops.convert_to_tensor(x))
        for x in generator.normal(size=(2, 1, length, 1, 3)).astype("float32")
    )
    value = generator.normal(size=(1, length, 1, 2)).astype("float32")
    mask = generator.random((1, length)) < 0.7
    tensors = ops.convert_to_tensor(value), ops.convert_to_tensor(mask)
    output = h.compiled(causal, block_size=h.BLOCK)(query, key, *tensors)
    h.assert_close(output, h.reference(query, key, value, mask).output)


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="of JAX")
def test_a_gradient_keeps_neither_outputs_nor_numerators():
    import jax

    feature_map, x = h.build("favorplus"), h.problem()
    features = h.featurize(feature_map, x.query, x.key)
    value = ops.cast(x.value, "bfloat16")
    output, gradient = jax.vjp(lambda v: causal(*features, v, block_size=4), value)
    kept = [a for a in jax.tree.leaves(gradient) if a.dtype == "float32"]
    width, tokens = output.shape[-1], output.shape[0] * output.shape[1]
    assert kept and not [a.shape for a in kept if a.shape[-1] == width]
    # The values that it was given, padded to blocks.
    others = [a for a in jax.tree.leaves(gradient) if a.dtype == "bfloat16"]
    assert sum(a.size for a in others) < 1.2 * tokens * x.value.shape[2] * width

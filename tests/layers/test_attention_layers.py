"""The layers against the Keras layers they stand for."""

import contextlib
import functools
import sys

import keras
import numpy as np
import pytest
from keras import ops

import keras_rfattn
from keras_rfattn import feature_maps
from keras_rfattn.layers import GroupedQueryAttention, MultiHeadAttention
from tests import helpers as h
from tests.feature_maps.cases import case
from tests.marks import each_map, first, first_on_jax

WIDTH = 8
KINDS = {
    "multi_head": (
        lambda **k: keras.layers.MultiHeadAttention(2, 4, **k),
        lambda **k: MultiHeadAttention(2, 4, **k),
    ),
    "grouped_query": (
        lambda **k: keras.layers.GroupQueryAttention(4, 4, 2, **k),
        lambda **k: GroupedQueryAttention(4, 4, 2, **k),
    ),
}


def data(*shape, scale=0.5):
    values = np.random.default_rng(len(shape)).normal(size=shape) * scale
    return values.astype("float32")


def pair(kind, **arguments):
    """A softmax layer and a linear one with the same projections."""
    softmax, linear = KINDS[kind]
    softmax, linear = softmax(), linear(seed=0, **arguments)
    for layer in (softmax, linear):
        layer.build((2, 6, WIDTH), (2, 6, WIDTH))
    shared = [w for w in linear.weights if "feature_map" not in w.path]
    for a, b in zip(shared, softmax.weights, strict=True):
        assert a.path.split("/")[-2:] == b.path.split("/")[-2:]
        a.assign(b)
    return softmax, linear


def numpy(x):
    return ops.convert_to_numpy(ops.cast(x, "float32"))


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
def test_wide_features_approach_softmax(kind, causal):
    softmax, narrow = pair(kind, feature_map="favorplus", num_features=64)
    _, wide = pair(kind, feature_map="favorplus", num_features=16384)
    for a, b in zip(wide.weights[:8], narrow.weights[:8], strict=True):
        a.assign(b)
    for a, b in zip(softmax.weights, narrow.weights, strict=False):
        a.assign(b)
    x = data(2, 6, WIDTH)
    expected = numpy(softmax(x, x, use_causal_mask=causal))
    # Uniform attention must not pass.
    spread = np.abs(expected - expected.mean(1, keepdims=True)).max()
    error = np.abs(numpy(wide(x, x, use_causal_mask=causal)) - expected).max()
    assert error < 0.1 * spread


@pytest.mark.smoke
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_interchangeable(kind):
    softmax, linear = pair(kind, feature_map="favorplus", num_features=16)
    assert [w.name for w in linear.weights[: len(softmax.weights)]] == [
        w.name for w in softmax.weights
    ]
    assert len(linear.trainable_weights) == len(softmax.trainable_weights)


@pytest.mark.parametrize(
    ("name", "kind"), first_on_jax([("favorpp", x) for x in KINDS])
)
def test_keras_masks_and_padding_content(name, kind):
    _, layer = pair(kind, feature_map=name)
    x = data(2, 6, WIDTH)
    mask = np.array([[1, 1, 1, 1, 0, 0], [0, 1, 1, 0, 1, 1]], bool)
    cross = numpy(layer(x, x.copy(), attention_mask=mask[:, None]))
    itself = numpy(layer(x, x, attention_mask=mask[:, None]))
    for content in (100.0, 1e30, np.nan):
        other = np.where(mask[..., None], x, content).astype("float32")
        changed = numpy(layer(x, other, attention_mask=mask[:, None]))
        np.testing.assert_array_equal(changed, cross)
        # Padding among the queries too: it must not reach a statistic either.
        changed = numpy(layer(other, other, attention_mask=mask[:, None]))
        np.testing.assert_array_equal(changed[mask], itself[mask])
    assert np.abs(itself - numpy(layer(x, x))).max() > 1e-4
    bias = [w for w in layer.weights if w.path.endswith("attention_output/bias")]
    nothing = numpy(layer(x, x, attention_mask=np.zeros((2, 1, 6), bool)))
    expected = numpy(bias[0]) if bias else 0
    np.testing.assert_array_equal(nothing, np.broadcast_to(expected, nothing.shape))


@pytest.mark.smoke
def test_masks_travel_with_keras_tensors():
    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(9, WIDTH, mask_zero=True)(inputs)
    layer = MultiHeadAttention(2, 4, feature_map="favorplus", seed=0)
    model = keras.Model(inputs, layer(x, x))
    tokens = np.array([[3, 4, 5, 0, 0, 0]])
    short = np.array([[3, 4, 5]])
    embedded = model.layers[1](short)
    alone = h.one_program(lambda x: layer(x, x))(ops.convert_to_tensor(embedded))
    np.testing.assert_allclose(
        model.predict(tokens, verbose=0)[:, :3], numpy(alone), rtol=1e-4, atol=1e-6
    )


@pytest.mark.smoke
@pytest.mark.parametrize("kind", KINDS)
def test_config_round_trip(kind):
    _, layer = pair(kind, feature_map="favorpp", num_features=12, block_size=4)
    copy = type(layer).from_config(layer.get_config())
    copy.build((2, 6, WIDTH), (2, 6, WIDTH))
    assert copy.feature_map.num_features == 12 and copy.options.block_size == 4
    np.testing.assert_array_equal(
        numpy(copy.feature_map.vectors), numpy(layer.feature_map.vectors)
    )


@pytest.mark.smoke
def test_grouped_queries_equal_repeated_keys():
    _, layer = pair("grouped_query", feature_map="favorplus", num_features=16)
    x = ops.convert_to_tensor(data(2, 6, WIDTH))
    query, key, value = (
        getattr(layer, f"_{n}_dense")(x) for n in ("query", "key", "value")
    )
    attend = keras_rfattn.layers.attend
    call = h.one_program(lambda *x: attend(*x, layer.feature_map))
    grouped = call(query, key, value)
    repeated = feature_maps.get("favorplus", num_features=16, seed=0)
    repeated.build((None, None, 4, 4))
    repeated.vectors.assign(ops.repeat(layer.feature_map.vectors, 2, axis=0))
    call = h.one_program(lambda *x: attend(*x, repeated))
    expected = call(query, ops.repeat(key, 2, axis=2), ops.repeat(value, 2, axis=2))
    np.testing.assert_allclose(numpy(grouped), numpy(expected), rtol=1e-5, atol=1e-6)
    assert np.abs(numpy(grouped)).max() > 1e-2


POLICIES = ("mixed_bfloat16", "mixed_float16", "bfloat16")


@functools.cache
def in_float32(name):
    """A layer, and its causal output for `data(2, 6, WIDTH)`."""
    _, layer = pair("multi_head", feature_map=name)
    x = data(2, 6, WIDTH)
    return layer, numpy(layer(x, x, use_causal_mask=True))


@pytest.mark.parametrize(("name", "policy"), first([("favorpp", x) for x in POLICIES]))
def test_low_precision(name, policy):
    layer, expected = in_float32(name)
    low = MultiHeadAttention(2, 4, feature_map=name, seed=0, dtype=policy)
    low.build((2, 6, WIDTH), (2, 6, WIDTH))
    for a, b in zip(low.weights, layer.weights, strict=True):
        a.assign(ops.cast(ops.convert_to_tensor(b), a.dtype))
    x = data(2, 6, WIDTH)
    output = low(x, x, use_causal_mask=True)
    assert keras.backend.standardize_dtype(output.dtype) == low.compute_dtype
    tolerance = case(name).low_precision
    error = np.abs(numpy(output) - expected).max()
    assert error < tolerance * np.abs(expected).max()
    assert np.isfinite(numpy(low(0 * x, 0 * x))).all()


@pytest.mark.parametrize("sizes", [("2", 8), (2.5, 8), (0, 8), (2, None), (True, 8)])
def test_sizes_of_multi_head_attention(sizes):
    with pytest.raises(ValueError, match="must be a positive integer. Received: "):
        MultiHeadAttention(*sizes)


def test_sizes_may_be_integers_of_numpy():
    config = MultiHeadAttention(np.int64(2), np.int64(8)).get_config()
    assert (config["num_heads"], config["key_dim"]) == (2, 8)


def test_the_seed_of_dropout_is_keras_own_affair():
    # A map given as an object has its own; what Keras takes is taken.
    layer = MultiHeadAttention(2, 4, feature_map=feature_maps.FavorPlus(4), seed=-3)
    again = MultiHeadAttention.from_config(layer.get_config())
    assert again.feature_map.seed == layer.feature_map.seed
    with pytest.raises(ValueError, match="`seed` must be a non-negative integer"):
        MultiHeadAttention(2, 4, feature_map="favorplus", seed=-3)


def test_arguments_that_linear_attention_cannot_keep():
    x = data(2, 6, WIDTH)
    for arguments in (dict(sliding_window=3), dict(attention_axes=(1, 2))):
        layer = MultiHeadAttention(2, 4, **arguments)
        shape = (2, 3, 6, WIDTH) if "attention_axes" in arguments else x.shape
        with pytest.raises(ValueError, match="cannot be linear"):
            layer.build(shape, shape)
    layer = GroupedQueryAttention(4, 4, 2)
    with pytest.raises(ValueError, match="return_attention_scores"):
        layer(x, x, return_attention_scores=True)
    with pytest.raises(ValueError, match="favorplus"):
        MultiHeadAttention(2, 4, feature_map="favorpluss")


def test_cross_attention_takes_no_statistics_of_its_queries():
    layer = MultiHeadAttention(2, 4, feature_map="favorpp", seed=0)
    x, memory = data(2, 6, WIDTH), data(2, 5, WIDTH)
    output = numpy(layer(x, memory))
    other = x.copy()
    other[:, 4:] *= 10
    np.testing.assert_array_equal(numpy(layer(other, memory))[:, :4], output[:, :4])
    itself = numpy(layer(x, x))
    assert np.any(numpy(layer(other, other))[:, :4] != itself[:, :4])


SIX = np.array([[1, 1, 1, 0, 1, 0], [0, 1, 1, 1, 1, 1]] * 3, bool)
MASKS = {
    "triangle of 6 rows and 6 tokens": np.tri(6, dtype=bool),
    "one row for all": SIX[:1],
    "one key for all": np.ones((6, 1), bool),
    "padding": SIX[:, None],
    "padding of one row for all": SIX[:1, None],
    "padding and causality": SIX[:, None] & np.tri(6, dtype=bool),
    "causality for all": np.tri(6, dtype=bool)[None],
    "an axis of heads": SIX[:, None, None],
}


@pytest.mark.parametrize("kind", first_on_jax(KINDS))
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("batch", first([6, 1]))
def test_masks_mean_what_they_mean_in_keras(kind, name, batch):
    # Within a window attention is softmax.
    softmax, linear = pair(kind, feature_map="favorplus", window=8)
    x, mask = data(batch, 6, WIDTH), MASKS[name]
    mask = mask[:batch] if len(mask.shape) > 2 else mask
    expected = numpy(softmax(x, x, attention_mask=mask))
    actual = numpy(linear(x, x, attention_mask=mask))
    # A query that sees no key is 0 here and the mean of all in Keras.
    seen = np.broadcast_to(mask if mask.ndim < 4 else mask[:, 0], (batch, 6, 6))
    seen = seen.any(-1)
    np.testing.assert_allclose(actual[seen], expected[seen], rtol=1e-4, atol=1e-6)
    assert np.abs(expected - numpy(softmax(x, x))).max() > 1e-3 or mask.all()


EMPTY = [(0, 6, WIDTH), (2, 0, WIDTH), (0, 0, WIDTH)]


@pytest.mark.parametrize("window", first_on_jax([None, 4]))
@pytest.mark.parametrize("causal", first_on_jax([True, False]))
@pytest.mark.parametrize("name", first(["favorpp", "polysketch"]))
def test_empty_batches_and_sequences(name, causal, window):
    layer = MultiHeadAttention(2, 4, feature_map=name, num_features=8, window=window)
    layer.build((None, None, WIDTH), (None, None, WIDTH))

    def call(x, mask):
        return layer(x, x, key_mask=mask, use_causal_mask=causal, training=True)

    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        shapes = [None, None, WIDTH], [None, None]
        call = tf.function(call, [tf.TensorSpec(shapes[0]), tf.TensorSpec(shapes[1])])
    for shape in (*EMPTY, (2, 5, WIDTH)):
        output = call(ops.ones(shape), ops.ones(shape[:2]))
        assert tuple(output.shape) == shape


def test_no_key_to_see():
    softmax, linear = pair("multi_head", feature_map="favorpp", num_features=8)
    x = data(2, 3, WIDTH)
    expected = numpy(softmax(x, x[:, :0]))
    np.testing.assert_array_equal(numpy(linear(x, x[:, :0])), expected)
    assert expected.shape == (2, 3, WIDTH)


# Maps with random vectors, of which one will do, and one of the head dim's width.
@pytest.mark.parametrize("causal", first_on_jax([True, False]))
@pytest.mark.parametrize(
    ("name", "size"),
    each_map([(name, {"key_dim": 4, "num_features": 1}) for name in h.RANDOM])
    + each_map([("elu", {"key_dim": 1})]),
)
def test_one_feature(name, size, causal):
    layer = MultiHeadAttention(2, feature_map=name, seed=0, **size)
    x = data(2, 6, WIDTH)
    output = numpy(layer(x, x, use_causal_mask=causal))
    assert np.all(np.isfinite(output)) and np.any(output != 0)
    # Attention is over the past, whatever the feature.
    changed = x.copy()
    changed[:, 4:] += 1
    moved = numpy(layer(changed, changed, use_causal_mask=causal)) - output
    assert not causal or np.all(moved[:, :4] == 0)
    assert np.any(moved[:, 4:] != 0)


@pytest.mark.once
@pytest.mark.full
def test_rematerialization_changes_no_number():
    x = np.random.default_rng(0).normal(size=(2, 9, 8)).astype("float32")

    def trained(feature_map, scope):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((9, 8))
        with scope:
            attention = keras.layers.MultiHeadAttention(2, 4)
        output = attention(inputs, inputs, use_causal_mask=True)
        model = keras.Model(inputs, output)
        keras_rfattn.replace_attention(model, feature_map, num_features=8, seed=0)
        before = [keras.ops.convert_to_numpy(w) for w in model.weights]
        model.compile("sgd", "mse")
        model.fit(x, x, epochs=2, verbose=0)
        after = [keras.ops.convert_to_numpy(w) for w in model.weights]
        moved = [np.any(a != b) for a, b in zip(before, after, strict=True)]
        names = [w.path for w in model.weights]
        return after, {n for n, m in zip(names, moved, strict=True) if m}

    scope = keras.RematScope(mode="full")
    plain, moved = trained("favorplus", contextlib.nullcontext())
    again, _ = trained("favorplus", scope)
    assert len(moved) == 8
    for a, b in zip(plain, again, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    # Nor does a map that only data fits.
    for mode in (contextlib.nullcontext(), scope):
        _, moved = trained("favorpp", mode)
        assert len(moved) == 8 and not any("feature_map" in name for name in moved)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="of TensorFlow")
def test_layers_of_a_model_share_a_traced_function(monkeypatch):
    import tensorflow as tf

    module, traced = sys.modules["keras_rfattn.ops.causal"], []
    original = module._causal

    def counted(*args, **kwargs):
        traced.append(kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(module, "_causal", counted)
    x = keras.Input((8, 6))
    output = x
    for width in (16, 16, 16, 24):
        layer = MultiHeadAttention(
            2, 4, feature_map="favorplus", num_features=width, seed=width
        )
        output = layer(output, output, use_causal_mask=True)
    model = keras.Model(x, output)
    data = np.random.default_rng(0).normal(size=(3, 8, 6)).astype("float32")
    expected = model(data)
    traced.clear()
    actual = tf.function(lambda x: model(x))(data)
    assert len(traced) == 2  # three layers alike, and one of another width
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)

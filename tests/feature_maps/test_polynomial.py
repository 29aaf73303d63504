"""Polynomial attention and its sketches."""

import math

import keras
import numpy as np
import pytest
from keras import ops

from keras_rfattn import feature_maps
from keras_rfattn.feature_maps.polynomial import PolySketchLearned
from keras_rfattn.layers.attend import attend
from keras_rfattn.ops import AttentionMask
from keras_rfattn.papers import Polynomial, PolySketch, PolySketchLinear
from tests import helpers as h
from tests.marks import first_on_jax

pytestmark = pytest.mark.once

DIM = 8


def build(cls, heads=1, dim=DIM, seed=0, **arguments):
    feature_map = cls(seed=seed, **arguments)
    feature_map.build((None, None, heads, dim))
    return feature_map


def unit_vectors(count, seed=0, dim=DIM):
    x = np.random.default_rng(seed).normal(size=(count, dim))
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype("float32")


def sketch(feature_map, x):
    """S(x) of `(n, H)`, whose self-tensor the features are: `(n, r)`."""
    features = feature_map.key_features(ops.convert_to_tensor(x[None, :, None]))
    half = np.exp(h.to_numpy(features.log_scale) / 2)
    return (h.to_numpy(features.values) * half)[0, :, 0]


def kernel(feature_map, x, y):
    """The products of the features themselves, `(n, m)`."""
    x, y = (dense(feature_map, a) for a in (x, y))
    return x @ y.T


def dense(feature_map, x):
    """φ(x) of `(n, H)`, `(n, r²)`."""
    features = feature_map.key_features(ops.convert_to_tensor(x[None, :, None]))
    features = features.dense()
    values, log_scale = (h.to_numpy(part)[0, :, 0] for part in features)
    return values.astype("float64") * np.exp(log_scale.astype("float64"))


def attention(feature_map, *mask):
    """`(query, key, value) -> output`, of arrays."""
    call = h.one_program(lambda *x: attend(*x, feature_map, *mask))
    return lambda *x: call(*map(ops.convert_to_tensor, x))


def test_products_of_a_degree_two_sketch_have_its_mean_and_variance():
    x, y = unit_vectors(1, seed=1), unit_vectors(1, seed=2) * 1.5
    count, draws = 4096, 40
    found = np.array(
        [
            np.sum(sketch(m, x) * sketch(m, y))
            for m in (
                build(PolySketch, num_features=count, seed=s) for s in range(draws)
            )
        ]
    )
    product = (x @ y.T).item()
    # Of one column: E[(x·g)²(y·g)²] = ‖x‖²‖y‖² + 2 (x·y)², twice, independent.
    second = (np.sum(x**2) * np.sum(y**2) + 2 * product**2) ** 2
    variance = (second - product**4) / count
    deviation = (np.mean(found) - product**2) / math.sqrt(variance / draws)
    assert abs(deviation) < 5
    # Chi-square of 40 draws of sums of 4096.
    assert 0.35 < np.var(found, ddof=1) / variance < 2.2


@pytest.mark.full
@pytest.mark.once
def test_products_of_a_degree_four_sketch_have_its_mean():
    x, y = unit_vectors(1, seed=1), unit_vectors(1, seed=3)
    y = 0.6 * y + 0.8 * x
    found = np.array(
        [
            np.sum(sketch(m, x) * sketch(m, y))
            for m in (
                build(PolySketch, degree=8, num_features=64, seed=s) for s in range(200)
            )
        ]
    )
    product = (x @ y.T).item() ** 4
    error = np.std(found, ddof=1) / math.sqrt(len(found))
    assert abs(np.mean(found) - product) < 5 * error
    # A missing 1/√r, or one too many, would be seen.
    assert error < 0.1 * product


@pytest.mark.parametrize("degree", first_on_jax([4, 8]))
@pytest.mark.parametrize("cls", first_on_jax([PolySketch, PolySketchLearned]))
def test_products_of_features_are_not_negative(cls, degree):
    feature_map = build(cls, degree=degree, num_features=8)
    x, y = 2 * unit_vectors(50, 1), unit_vectors(60, 2)
    products = kernel(feature_map, x, y)
    assert np.min(products) >= -1e-6 * np.max(products)
    # The sketch's own are, which is what the square is for.
    assert np.min(sketch(feature_map, x) @ sketch(feature_map, y).T) < 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("degree", "sizes"), [(4, (256, 1024, 4096)), (8, (256, 1024))]
)
def test_frobenius_error_falls_with_the_root_of_the_size(degree, sizes):
    x, y = unit_vectors(64, 1), unit_vectors(64, 2)
    exact = (x @ y.T).astype("float64") ** degree

    def error(size, seed):
        m = build(PolySketch, degree=degree, num_features=size, seed=seed)
        products = sketch(m, x).astype("float64") @ sketch(m, y).T
        # ‖X^{⊗p}‖_F is √n for unit rows: theorem 1.1's ε.
        return np.linalg.norm(products**2 - exact) / 64

    errors = [np.mean([error(size, seed) for seed in range(10)]) for size in sizes]
    for small, large in zip(errors[1:], errors[:-1], strict=True):
        # A half; the bias of the square, which falls with the size, makes it less.
        assert 0.3 < small / large < 0.65
    assert errors[-1] < 0.1


@pytest.mark.full
def test_sketch_is_near_the_kernel_where_it_is_large():
    x = unit_vectors(32, 1)
    exact = (x @ x.T).astype("float64") ** 4
    found = kernel(build(PolySketch, num_features=1024), x, x)
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert error < 0.25
    nothing = np.linalg.norm(np.mean(exact) - exact) / np.linalg.norm(exact)
    assert nothing > 2 * error


@pytest.mark.parametrize("cls", [PolySketch, PolySketchLearned, Polynomial])
def test_degree_two_is_exact(cls):
    x, y = unit_vectors(5, 1), 3 * unit_vectors(6, 2)
    found = kernel(build(cls, degree=2), x, y)
    h.assert_close(found, (x @ y.T) ** 2)


@pytest.mark.parametrize("degree", [2, 4, 6])
def test_exact_features(degree):
    x, y = unit_vectors(5, 1, dim=4), 2 * unit_vectors(6, 2, dim=4)
    if degree % 4 == 2 and degree > 2:
        # Not a power of two: the kernel is, a sketch is not.
        with pytest.raises(ValueError, match="`degree` of a sketch must be"):
            PolySketch(degree=degree)
    found = kernel(build(Polynomial, dim=4, degree=degree), x, y)
    h.assert_close(found, (x @ y.T) ** degree)


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("degree", [2, 4, 8])
def test_networks_of_the_learned_sketch(degree, size):
    feature_map = build(PolySketchLearned, dim=64, degree=degree, num_features=size)
    networks = [n for level in feature_map.networks for n in level]
    assert len(networks) == degree - 2 if degree > 2 else not networks
    for network in networks[: degree // 2]:
        # About 8 h r + 24 r², biases and normalizations beside.
        count, least = network.count_params(), 8 * 64 * size + 24 * size**2
        assert least < count < 1.05 * least + 20 * size
    assert all(w.trainable for n in networks for w in n.weights)


def test_learned_sketch_is_bounded():
    feature_map = build(PolySketchLearned, num_features=16)
    for weight in feature_map.networks[0][0].weights:
        weight.assign(10 * weight)
    values = sketch(feature_map, 100 * unit_vectors(50))
    assert np.max(np.abs(values)) <= 4 + 1e-5
    assert np.max(np.abs(values)) > 1


@pytest.mark.parametrize("name", h.POLYNOMIAL)
def test_queries_and_keys_are_normalized_first(name):
    feature_map = h.build(name, kv_heads=h.HEADS)
    x = h.problem(kv_heads=h.HEADS, size=3.0)
    call = attention(feature_map)
    expected = call(*x)
    moved = call(2 * x.query + 5, 7 * x.key - 1, x.value)
    # The normalization's epsilon of 1e-3 is all that is left of the size.
    h.assert_close(moved, expected, 1e-2)
    other = call(x.query * x.query, x.key, x.value)
    assert np.max(np.abs(h.to_numpy(other) - h.to_numpy(expected))) > 0.01


def test_polynomial_attention_by_hand():
    feature_map = build(Polynomial, heads=2, dim=16, degree=4)
    generator = np.random.default_rng(0)
    query, key, value = generator.normal(size=(3, 1, 9, 2, 16)).astype("float32")

    def normalize(x):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt(x.var(-1, keepdims=True) + feature_map.query_norm.epsilon)

    weights = np.einsum("btnh,bsnh->bnts", normalize(query), normalize(key)) / 4
    weights = np.tri(9) * weights.astype("float64") ** 4
    weights = weights / (1 + weights.sum(-1, keepdims=True))
    expected = np.einsum("bnts,bsnv->btnv", weights, value)
    call = attention(feature_map, AttentionMask(causal=True))
    h.assert_close(call(query, key, value), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_pairs_are_weighed_where_they_are_fewer_than_features(causal):
    asked = []

    class Watched(Polynomial):
        def key_features(self, x):
            asked.append(x)
            return super().key_features(x)

    feature_map = build(Watched, heads=2, dim=3, degree=2)
    x = np.random.default_rng(0).normal(size=(3, 2, 14, 2, 3)).astype("float32")
    mask = AttentionMask(causal=causal, key_mask=np.arange(14)[None] < 9)
    by_features = attention(feature_map, mask)(*x)
    assert asked
    asked.clear()
    by_pairs = attention(feature_map, AttentionMask(causal=causal))(*x[:, :, :9])
    assert not asked
    h.assert_close(by_pairs, h.to_numpy(by_features)[:, :9], 1e-5)


@pytest.mark.parametrize("degree", [0, 3, -2, 2.0, True])
@pytest.mark.parametrize("name", h.POLYNOMIAL)
def test_degree_must_be_even(name, degree):
    with pytest.raises(ValueError, match="`degree` must be a positive even integer"):
        feature_maps.get(name, degree=degree)


@pytest.mark.full
@pytest.mark.once
def test_trained_networks_survive_saving(tmp_path):
    layer = keras.Sequential([keras.Input((6, 16)), Wrapped()])
    for weight in layer.trainable_weights:
        weight.assign(weight + 0.01)
    x = np.random.default_rng(0).normal(size=(2, 6, 16)).astype("float32")
    layer.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    h.assert_same(again.predict(x, verbose=0), layer.predict(x, verbose=0))


@keras.saving.register_keras_serializable("tests")
class Wrapped(keras.layers.Layer):
    """Self-attention by a learned sketch."""

    def __init__(self, **kwargs):
        from keras_rfattn import layers

        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(
            2, 8, feature_map=PolySketchLearned(num_features=4, seed=0), window=2
        )

    def build(self, input_shape):
        self.attention.build(input_shape, input_shape)

    def call(self, x):
        return self.attention(x, x, use_causal_mask=True)


def test_what_is_not_there_cannot_be_chosen():
    with pytest.raises(ValueError, match="must be `None` for Polynomial"):
        feature_maps.get("polynomial", num_features=64)
    for name in ("polynomial", "polysketch_learned"):
        with pytest.raises(ValueError, match="projection"):
            feature_maps.get(name, projection="gaussian")


def test_a_linear_sketch_starts_random_and_learns():
    random, linear = (
        build(cls, num_features=8) for cls in (PolySketch, PolySketchLinear)
    )
    x = unit_vectors(4, 1)
    h.assert_same(sketch(linear, x), sketch(random, x))
    assert linear.trainable_weights and not [
        w for w in random.trainable_weights if "matrices" in w.path
    ]

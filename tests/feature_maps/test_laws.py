"""The laws of `feature_maps/base.py`, over the registry."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

from keras_rfattn import feature_maps, layers
from keras_rfattn.ops.exponents import Exponents
from keras_rfattn.ops.layout import heads_first, merge_heads
from tests import helpers as h
from tests.marks import each_map

HAVE_VECTORS = h.RANDOM


def features(name, x, side="key_features"):
    return program(name, side)(ops.convert_to_tensor(x))


@functools.cache
def program(name, side):
    feature_map = h.build(name)

    def call(x):
        return getattr(feature_map, side)(x).dense()

    return h.one_program(call)


def fresh(name, seed=7, **arguments):
    if name in HAVE_VECTORS:
        arguments.setdefault("num_features", 6)
    feature_map = feature_maps.get(name, seed=seed, **{**h.small(name), **arguments})
    feature_map.build((None, None, h.KV_HEADS, h.HEAD_DIM))
    return feature_map


def vectors(feature_map):
    """The random weight of a map, the first of a sketch's."""
    found = getattr(feature_map, "vectors", None)
    return feature_map.matrices[0] if found is None else found


@pytest.mark.parametrize("side", ["query_features", "key_features"])
@pytest.mark.parametrize("name", h.EACH_MAP)
def test_shapes_and_ranges(name, side):
    feature_map = h.build(name)
    for size in (0.0, 1.0, 50.0):
        values, log_scale = features(name, size * h.problem().key, side)
        lead = (h.BATCH, h.LENGTH, h.KV_HEADS)
        assert tuple(log_scale.shape) == (*lead, feature_map.features_per_scale)
        assert np.all(np.isfinite(h.to_numpy(log_scale)))
        assert feature_map.is_positive or values is not None
        if values is not None:
            assert tuple(values.shape[:-1]) == lead
            assert features(name, h.problem().key, side).width == feature_map.output_dim
            assert np.max(np.abs(h.to_numpy(values))) <= 1 + 1e-6
        else:
            assert feature_map.features_per_scale == feature_map.output_dim


@pytest.mark.parametrize("side", ["query_features", "key_features"])
@pytest.mark.parametrize("name", h.EACH_MAP)
def test_exponents_are_those_of_features(name, side):
    feature_map, x = h.build(name), ops.convert_to_tensor(h.problem().query)
    found = getattr(feature_map, side)(x)
    assert isinstance(found, Exponents) == feature_map.has_exponents
    if not feature_map.has_exponents:
        return
    shape = h.KV_HEADS, h.HEAD_DIM, feature_map.output_dim
    assert tuple(found.matrix.shape) == (1, *shape)
    assert tuple(found.bias.shape) == (1, h.KV_HEADS, 1, feature_map.output_dim)
    assert found.width == found.scale_width == feature_map.output_dim
    # Groups of query heads share what a key head has.
    groups = h.HEADS // h.KV_HEADS
    matrix, bias = (ops.repeat(p, groups, axis=1) for p in (found.matrix, found.bias))
    products = ops.einsum("btnh,onhm->btnm", found.x, matrix)
    rows = heads_first(found, h.KV_HEADS)
    common = merge_heads(rows.settled().common, h.HEADS, h.LENGTH)
    assert common.shape[-1] == 1
    actual = products + ops.swapaxes(bias, 1, 2) + common
    expected = found.dense()
    assert expected.values is None
    h.assert_close(actual, expected.log_scale, 1e-5)
    computed = merge_heads(rows.compute().log_scale, h.HEADS, h.LENGTH)
    h.assert_close(computed, expected.log_scale, 1e-5)
    # Without it, the features of a token keep their ratios.
    relative = merge_heads(rows.relative().compute().log_scale, h.HEADS, h.LENGTH)
    h.assert_close(relative + common, expected.log_scale, 1e-5)


@pytest.mark.parametrize("name", h.EACH_MAP)
def test_a_bound_map_scales_tokens(name):
    # In calls that are not bound to their sequence.
    feature_map, x = h.build(name), h.problem()
    query, key = (ops.convert_to_tensor(a) for a in (x.query, x.key))
    bound = feature_map.bind(query, key, 0.3, causal=True)
    for side, tokens in (("query_features", query), ("key_features", key)):
        expected = getattr(feature_map, side)(0.3 * tokens).dense()
        found = getattr(bound, side)(tokens).dense()
        for a, e in zip(found, expected, strict=True):
            if e is not None:
                h.assert_close(a, e, 1e-5)
    assert bound.output_dim == feature_map.output_dim
    assert bound.side == 0.3


# Whose values alone are negative somewhere; what others adapt to here may leave them
# positive.
SIGNED = ("favor", "complex_exponential", "hybrid_angular")


@pytest.mark.parametrize("name", h.EACH_MAP)
def test_products_are_positive_if_it_says_so(name):
    # By the declaration alone a map could be either.
    feature_map, x = h.build(name), h.problem(size=3.0)
    query, key = h.featurize(feature_map, x.query[:, :, ::2], x.key)

    def dense(f):
        f = h._wide(f)
        return np.ones_like(f.log_scale) if f.values is None else f.values

    products = np.einsum("btnm,bsnm->bnts", dense(query), dense(key))
    if feature_map.is_positive:
        assert np.all(products > 0)
    elif name in SIGNED:
        assert np.any(products < 0)


@pytest.mark.parametrize("side", ["query_features", "key_features"])
@pytest.mark.parametrize("name", h.EACH_MAP)
def test_tokens_do_not_see_each_other(name, side):
    x = h.problem().key
    order = np.random.default_rng(0).permutation(h.LENGTH)
    for whole, moved, single in zip(
        features(name, x, side),
        features(name, x[:, order], side),
        features(name, x[:, 5:6], side),
        strict=True,
    ):
        if whole is not None:
            whole = h.to_numpy(whole)
            h.assert_close(moved, whole[:, order], 1e-5)
            h.assert_close(single, whole[:, 5:6], 1e-5)


@pytest.mark.parametrize("name", h.EACH_MAP)
def test_grouped_queries_use_the_vectors_of_their_head(name):
    feature_map, x = h.build(name), h.problem()
    query, key = (ops.convert_to_tensor(a) for a in (x.query, x.key))
    call = h.one_program(lambda x: feature_map.query_features(x).dense())
    grouped = call(query)
    for head in range(h.HEADS):
        # The query in the place of the key head it belongs to.
        own = head * h.KV_HEADS // h.HEADS
        alone = np.zeros_like(x.key)
        alone[:, :, own] = x.query[:, :, head]
        expected = call(ops.convert_to_tensor(alone))
        for a, e in zip(grouped, expected, strict=True):
            if a is not None:
                h.assert_close(
                    h.to_numpy(a)[:, :, head], h.to_numpy(e)[:, :, own], 1e-5
                )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", h.EACH_MAP)
def test_exponents_of_narrow_inputs_are_float32(name, dtype):
    x = ops.cast(h.problem(size=3.0).key, dtype)
    expected = features(name, h.to_numpy(x).astype("float32"))
    for a, e in zip(features(name, x), expected, strict=True):
        if a is not None:
            assert keras.backend.standardize_dtype(a.dtype) == "float32"
            h.assert_close(a, e, 1e-6)


@pytest.mark.parametrize("name", h.EACH_MAP)
def test_float64_stays_float64(name):
    x = 0.5 * h.problem(length=3, dtype="float64").key
    narrow = features(name, x.astype("float32"))
    with h.double_precision():
        wide = features(name, x)
        assert keras.backend.standardize_dtype(wide.log_scale.dtype) == "float64"
        for a, e in zip(narrow, wide, strict=True):
            if a is not None and np.any(h.to_numpy(e) != 0):
                h.assert_close(a, e, 1e-4)


@pytest.mark.parametrize("name", each_map(HAVE_VECTORS))
def test_vectors_stay_float32_under_any_policy(name):
    feature_map = fresh(name, dtype="mixed_bfloat16")
    assert keras.backend.standardize_dtype(vectors(feature_map).dtype) == "float32"
    h.assert_same(vectors(feature_map), vectors(fresh(name)))
    assert vectors(feature_map).trainable == getattr(feature_map, "trains", False)


def assert_different(a, b):
    """Not one number in common, or not most if they are counts."""
    a, b = h.to_numpy(a), h.to_numpy(b)
    are_counts = np.all(a == np.round(a))
    assert np.mean(a == b) <= (0.9 if are_counts else 0)


@pytest.mark.parametrize("name", each_map(HAVE_VECTORS))
def test_the_seed_decides_the_vectors(name):
    h.assert_same(vectors(fresh(name)), vectors(fresh(name)))
    assert_different(vectors(fresh(name, seed=8)), vectors(fresh(name)))


@pytest.mark.parametrize("name", each_map(HAVE_VECTORS))
def test_maps_without_a_seed_differ(name):
    one, other = fresh(name, seed=None), fresh(name, seed=None)
    assert_different(vectors(one), vectors(other))
    # And each can be made again from its config.
    again = feature_maps.get(feature_maps.serialize(one))
    again.build((None, None, h.KV_HEADS, h.HEAD_DIM))
    h.assert_same(vectors(again), vectors(one))


@pytest.mark.parametrize("name", each_map(HAVE_VECTORS))
def test_nothing_random_happens_in_a_call(name):
    # One program would draw when it is made, and never again.
    x = ops.convert_to_tensor(h.problem().key)
    calls = (program.__wrapped__(name, "key_features")(x) for _ in range(2))
    for a, b in zip(*calls, strict=True):
        if a is not None:
            h.assert_same(a, b)


@pytest.mark.parametrize("name", each_map(HAVE_VECTORS))
def test_redraw(name):
    one, same = fresh(name), fresh(name)
    draws = [h.to_numpy(vectors(one)).copy()]
    for count in (1, 2, 3):
        one.redraw()
        same.redraw()
        assert int(h.to_numpy(one.draws)) == count
        h.assert_same(vectors(one), vectors(same))
        draws.append(h.to_numpy(vectors(one)).copy())
    for i, a in enumerate(draws):
        for b in draws[:i]:
            assert_different(a, b)


def test_redraw_needs_vectors():
    with pytest.raises(ValueError, match="no random vectors to redraw"):
        feature_maps.get("favor").redraw()
    with pytest.raises(ValueError, match="no random vectors to redraw"):
        fresh("elu").redraw()


def model(name, seed):
    feature_map = feature_maps.get(name, seed=seed)
    x = keras.Input((5, 8))
    layer = layers.MultiHeadAttention(2, 4, feature_map=feature_map, name="attention")
    return keras.Model(x, layer(x, x)), feature_map


@pytest.mark.parametrize("name", h.EACH_MAP)
def test_may_be_built_while_a_program_is_traced(name):
    # A model that meets data for the first time in `fit` builds its layers there.
    class Unbuilt(keras.Model):
        def __init__(self):
            super().__init__()
            arguments = {"feature_map": feature_maps.get(name, seed=1)}
            self.attention = layers.MultiHeadAttention(2, 4, **arguments)

        def call(self, x):
            return self.attention(x, x)

    late = Unbuilt()
    # As `fit` does before its first step.
    late.compute_output_spec(keras.KerasTensor((2, 5, 8)))
    assert late.attention.built
    early = feature_maps.get(name, seed=1)
    early.build((None, None, 2, 4))
    for a, b in zip(late.attention.feature_map.weights, early.weights, strict=True):
        np.testing.assert_array_equal(h.to_numpy(a), h.to_numpy(b))


@pytest.mark.parametrize("name", h.EACH_MAP)
def test_weights_bring_the_vectors_along(name, tmp_path):
    one, feature_map = model(name, seed=1)
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype("float32")
    call = h.forward(one)
    before = h.to_numpy(call(x))
    if name in HAVE_VECTORS:
        feature_map.redraw()
        assert not np.allclose(h.to_numpy(call(x)), before, atol=1e-4)
    path = str(tmp_path / "a.weights.h5")
    one.save_weights(path)
    other, loaded = model(name, seed=2)
    other.load_weights(path)
    h.assert_same(h.forward(other)(x), call(x))
    if name in HAVE_VECTORS:
        assert int(h.to_numpy(loaded.draws)) == 1


@pytest.mark.parametrize("name", h.EACH_MAP)
def test_gradients_of_features(name):
    # In float64, where a step may be so short that it meets no kink of an activation.
    feature_map, x = h.build(name), h.problem(length=2, dtype="float64").key

    @h.one_program
    def total(x):
        values, log_scale = feature_map.key_features(x).dense()
        # Features that are off have an exponent for -inf.
        log_scale = ops.where(log_scale < -1e20, 0, log_scale)
        return log_scale if values is None else values + log_scale

    with h.double_precision():
        (actual,) = h.gradients(total, x)
        direction = np.random.default_rng(4).normal(size=x.shape)
        weights = np.cos(np.arange(np.prod(total(ops.convert_to_tensor(x)).shape)))

        def along(t):
            moved = total(ops.convert_to_tensor(x + t * direction))
            return np.sum(h.to_numpy(moved).ravel() * weights)

        step = 1e-4
        slope = (along(step) - along(-step)) / (2 * step)
    h.assert_close(np.sum(actual * direction), slope, 2e-2)


HEADS = 4000
LIMIT = 6  # standard errors, of some hundred comparisons once in a million runs


@pytest.mark.parametrize("name", h.EACH_MAP)
def test_products_average_to_the_kernel(name):
    """Law 3. Every head draws its own vectors: as many estimates of each pair."""
    feature_map = feature_maps.get(name, seed=3, **h.small(name))
    if not feature_map.is_unbiased:
        pytest.skip(f"{name} does not claim to be unbiased")
    is_random = any(w.name in ("vectors", "draws") for w in built(feature_map).weights)
    heads = HEADS if is_random else 1
    feature_map = feature_maps.get(name, seed=3, **h.small(name))
    feature_map.build((None, None, heads, 4))
    x, y = (a.astype("float32") for a in short_pairs())
    sides = (
        ops.convert_to_tensor(np.repeat(a[None, :, None], heads, axis=2))
        for a in (x, y)
    )
    query, key = (
        h.one_program(getattr(feature_map, method))(side)
        for method, side in zip(("query_features", "key_features"), sides, strict=True)
    )
    query, key = (h._wide(f) for f in (query, key))
    products = np.exp(query.log_scale) * np.exp(key.log_scale)
    for f in (query, key):
        products = products * (1 if f.values is None else f.values)
    found = products[0].sum(-1)
    kernel = np.diagonal(exact(feature_map, x, y))
    error = found.std(axis=1) / np.sqrt(heads)
    # A wrong sign of ‖x‖² would change the kernel by a quarter and more.
    assert np.max(LIMIT * error / kernel) < 0.2, f"{name}: too few draws to tell"
    worst = np.max(np.abs(found.mean(1) - kernel) - LIMIT * error)
    assert worst < 2e-5, (
        f"law 3 does not hold of {name}: its products average to {found.mean(1)}, "
        f"and its kernel {feature_map.kernel!r} is {kernel}"
    )


def built(feature_map):
    feature_map.build((None, None, 1, 4))
    return feature_map


def short_pairs():
    """`(x, y)` of lengths near 1/2 at every angle."""
    x, y = np.random.default_rng(0).normal(size=(2, 6, 4))
    x *= 0.5 / np.linalg.norm(x, axis=-1, keepdims=True)
    y *= np.linspace(0.3, 0.6, 6)[:, None] / np.linalg.norm(y, axis=-1, keepdims=True)
    return x, y


@pytest.mark.parametrize("name", h.EACH_MAP)
def test_the_kernel_has_an_exact_form(name):
    feature_map = feature_maps.get(name, seed=0)
    x, y = short_pairs()
    formulas = {
        "softmax": lambda x: np.exp(x),
        "polynomial": lambda x: x**feature_map.degree,
    }
    assert feature_map.exact_kernel is not None or not feature_map.is_unbiased
    if feature_map.exact_kernel is not None:
        expected = formulas[feature_map.kernel](x @ y.T)
        h.assert_close(exact(feature_map, x, y), expected)


def exact(feature_map, x, y):
    """The kernel of the map, `(T, S)` for tokens `(T, H)` and `(S, H)`."""
    tensors = (ops.convert_to_tensor(a.astype("float32")) for a in (x, y))
    visible = ops.ones((len(x), len(y)), "bool")
    weights, shift = feature_map.exact_kernel(*tensors, visible)
    return h.to_numpy(weights) * np.exp(h.to_numpy(shift))[:, None]

"""The exponential map: its formula, its binding to a call and its folded weights."""

import functools
import textwrap
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from keras import ops

import keras_rfattn
from keras_rfattn import feature_maps as maps
from keras_rfattn.feature_maps import fits
from keras_rfattn.layers import MultiHeadAttention, attend
from keras_rfattn.ops import AttentionMask, Options, bidirectional, causal
from tests import helpers as h
from tests.marks import slow_on_jax
from tests.ops.definition import weighed

GROUPS = h.HEADS // h.KV_HEADS
SIDE = h.HEAD_DIM**-0.25
PRESETS = {
    "favorplus": maps.FavorPlus,
    "favorpp": maps.FavorPP,
    "favorpp_dense": maps.FavorPPDense,
    "favorpp_learned": maps.FavorPPLearned,
}
ADAPTIVE = [name for name in PRESETS if name != "favorplus"]
BOUND = ["favorpp", "favorpp_dense"]
# The weights that the function in `Exponential`'s docstring takes, in its order.
ARGUMENTS = (
    "query_vectors", "key_vectors", "a", "bias", "query_matrices", "key_matrices",
    "query_centers", "key_centers",
)  # fmt: skip
STATES = [(name, "drawn") for name in PRESETS]
STATES += [(name, "calibrated") for name in ADAPTIVE] + [("favorpp_learned", "trained")]


def build(name, heads=h.KV_HEADS, dim=h.HEAD_DIM, features=16, seed=3):
    feature_map = PRESETS[name](features, seed=seed)
    feature_map.build((None, None, heads, dim))
    return feature_map


def in_state(name, state):
    feature_map = build(name)
    if state != "drawn":
        feature_map.adapt([h.sample(), h.sample(length=25)])
    if state == "trained":
        # Each weight by itself, so that none is the inverse of another.
        generator = np.random.default_rng(4)
        for weight in feature_map.trainable_variables:
            weight.assign(weight + 0.05 * generator.normal(size=weight.shape))
    return feature_map


def weights_of(feature_map):
    """The arguments of `documented`, each for all heads, in float64."""
    dim = h.HEAD_DIM
    weights = {
        "centers": np.zeros((h.KV_HEADS, 2, dim)),
        "matrices": np.broadcast_to(np.eye(dim), (h.KV_HEADS, 2, dim, dim)),
    }
    for weight in feature_map.weights:
        weights[weight.name] = h.to_numpy(weight)
    # One A of a head is that of each direction.
    a = np.broadcast_to(weights["a"].astype("float64"), (h.KV_HEADS, dim))
    return {"a": a, "bias": weights["bias"].astype("float64")} | {
        f"{side}_{name}": weights[name][:, i].astype("float64")
        for name in ("vectors", "centers", "matrices")
        for side, i in (("query", 0), ("key", -1))
    }


# --- The function in the docstring


def documented(numpy=np):
    """The function and the expression of attention in `Exponential`'s docstring."""
    lines = textwrap.dedent(maps.Exponential.__doc__.partition("\n")[2]).splitlines()
    start = next(i for i, x in enumerate(lines) if x.strip().startswith("def features"))
    stop = next(i for i, x in enumerate(lines) if x.strip().startswith("attention ="))
    code = textwrap.dedent("\n".join(lines[start : stop + 1]))
    function, call, attention = code.rpartition("phi_q, phi_k = features(...)\n")
    assert function and call, "the docstring has another form"
    names = {"np": numpy}
    exec(function, names)
    return names["features"], attention.partition("=")[2].strip()


def oracle(query, key, value, weights, is_causal):
    """Attention of one row, `(T, N, V)`, by what the docstring says."""
    features, attention = documented()
    query, key, value = (x.astype("float64") for x in (query, key, value))
    output = np.zeros((*query.shape[:2], value.shape[-1]))
    for head in range(query.shape[1]):
        k = head // (query.shape[1] // key.shape[1])
        phi_q, phi_k = features(
            query[:, head], key[:, k], *(weights[x][k] for x in ARGUMENTS)
        )
        for i in range(len(query)):
            seen = slice(0, i + 1 if is_causal else len(key))
            names = {"phi_q": phi_q[i : i + 1], "phi_k": phi_k[seen]}
            row = eval(attention, {**names, "v": value[seen, k]})
            output[i, head] = row[0]
    return output


def bound_weights(feature_map, query, key):
    """The weights for one scaled sequence, by the fit of this very sequence."""
    weights = weights_of(feature_map)
    shape = len(query), h.KV_HEADS, -1, h.HEAD_DIM
    q = np.reshape(query, shape).transpose(1, 0, 2, 3).reshape(h.KV_HEADS, -1, shape[3])
    squares = fits.mean_square(q, key.swapaxes(0, 1))
    if feature_map.best_a is fits.best_a_of_head:
        a = fits.best_a(squares.sum(-1, keepdims=True), h.HEAD_DIM)
    else:
        a = fits.best_a(squares, 1)
    a = np.broadcast_to(h.to_numpy(a).astype("float64"), squares.shape)
    return {**weights, "a": a}


def attention_of(feature_map, x, is_causal=False, mask=None, options=None):
    mask = None if mask is None else ops.convert_to_tensor(mask)
    mask = AttentionMask(mask, causal=is_causal, self_attention=True)
    tokens = [ops.convert_to_tensor(a) for a in x]

    def call(*tokens):
        return attend(*tokens, feature_map, mask, options=options)

    return h.to_numpy(h.one_program(call)(*tokens))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("name", "state"), STATES)
def test_is_the_function_in_its_docstring(name, state, is_causal):
    feature_map, x = in_state(name, state), h.problem()
    is_bound = name in BOUND and state == "drawn" and not is_causal
    expected = []
    for query, key, value in zip(*x, strict=True):
        query, key = SIDE * query, SIDE * key
        weights = weights_of(feature_map)
        if is_bound:
            weights = bound_weights(feature_map, query, key)
        expected.append(oracle(query, key, value, weights, is_causal))
    h.assert_close(attention_of(feature_map, x, is_causal), np.array(expected))


def test_states_are_different_functions():
    # Else the comparison above could not tell one from another.
    outputs = {
        (name, state, is_causal): attention_of(
            in_state(name, state), h.problem(), is_causal
        )
        for name, state in STATES
        for is_causal in (False, True)
    }
    same = [{(name, "drawn", True) for name in PRESETS}]
    same += [{(name, "drawn", False) for name in ("favorplus", "favorpp_learned")}]
    same += [
        {(name, "calibrated", c) for name in ("favorpp_dense", "favorpp_learned")}
        for c in (False, True)
    ]
    for a in outputs:
        for b in outputs:
            distance = np.abs(outputs[a] - outputs[b]).max()
            alike = a == b or any({a, b} <= group for group in same)
            assert distance < 1e-5 if alike else distance > 1e-3, (a, b)


def test_features_of_tokens_are_those_of_the_docstring():
    # Unbound, for scaled tokens; also the factor that cancels in attention.
    feature_map, x = in_state("favorpp_learned", "trained"), h.problem()
    features, _ = documented()
    weights = weights_of(feature_map)
    found = [
        np.exp(h.to_numpy(f.dense().log_scale).astype("float64"))[0]
        for f in (
            feature_map.query_features(ops.convert_to_tensor(SIDE * x.query)),
            feature_map.key_features(ops.convert_to_tensor(SIDE * x.key)),
        )
    ]
    for head in range(h.HEADS):
        k = head // GROUPS
        expected = features(
            SIDE * x.query[0, :, head].astype("float64"),
            SIDE * x.key[0, :, k].astype("float64"),
            *(weights[name][k] for name in ARGUMENTS),
        )
        for array, one, n in zip(found, expected, (head, k), strict=True):
            h.assert_close(np.log(array[:, n]), np.log(one))


# --- The fit


@pytest.mark.parametrize("name", ["favorplus", "favorpp_dense"])
def test_the_learned_map_starts_as_another_bit_for_bit(name):
    learned, source = build("favorpp_learned"), build(name)
    if name == "favorpp_dense":
        for feature_map in (learned, source):
            feature_map.adapt([h.sample()])
    x = ops.convert_to_tensor(h.problem().key)
    for method in ("query_features", "key_features"):
        expected = getattr(source, method)(x).dense().log_scale
        found = getattr(learned, method)(x).dense().log_scale
        if name == "favorplus":
            # Products with the identity round.
            h.assert_close(found, expected, 1e-6)
        else:
            h.assert_same(found, expected)


def test_every_weight_of_the_learned_map_trains():
    learned = build("favorpp_learned")
    names = {w.path.split("/")[-1] for w in learned.trainable_weights}
    assert names == {"vectors", "a", "bias", "centers", "matrices"}
    tensors = [ops.convert_to_tensor(x) for x in h.problem()]
    mask = AttentionMask(causal=True, self_attention=True)
    learned.adapt([h.sample()])
    variables = [w for w in learned.trainable_variables]
    before = h.to_numpy(attend(*tensors, learned, mask))
    for weight in variables:
        value = h.to_numpy(weight).copy()
        is_shared = weight.name in ("a", "bias")
        for side in range(1 if is_shared else value.shape[1]):
            step = np.random.default_rng(0).normal(size=value.shape)
            if not is_shared:
                step[:, 1 - side] = 0
            if weight.name == "a":
                step = -np.abs(step)
            weight.assign(value + 0.3 * step)
            # A weight that the output does not depend on would train for nothing.
            moved = h.to_numpy(attend(*tensors, learned, mask)) - before
            assert np.abs(moved).max() > 1e-3
            weight.assign(value)
    for name in ("favorplus", *BOUND):
        assert not build(name).trainable_variables


DRAWS = 40


def kernel(feature_map, pair):
    """Estimates `(K, T, S)` in float64."""
    sides = (
        getattr(feature_map, f"{side}_features")(
            ops.convert_to_tensor(x.swapaxes(0, 1)[None].astype("float32"))
        )
        for side, x in zip(("query", "key"), pair, strict=True)
    )
    query, key = (
        np.exp(h.to_numpy(x.dense().log_scale)[0].astype("float64")).swapaxes(0, 1)
        for x in sides
    )
    return query @ key.swapaxes(-1, -2)


def off_center(length=200, heads=2, dim=6):
    """Queries and keys off center, of very different covariances."""
    generator = np.random.default_rng(0)
    mix = 0.4 * generator.normal(size=(2, dim, dim)) * np.linspace(0.3, 1.5, dim)
    mix[1] = mix[1][:, ::-1]
    centers = generator.normal(size=(2, 1, dim))
    tokens = generator.normal(size=(2, heads, length, dim))
    return tuple(
        0.5 * (t @ m + c) for t, m, c in zip(tokens, mix, centers, strict=True)
    )


@pytest.mark.once
@pytest.mark.parametrize("name", ADAPTIVE)
def test_estimates_the_softmax_kernel_of_the_original_tokens(name):
    pair = tuple(0.5 * x[:, :4] for x in off_center())
    exact = np.exp(pair[0] @ pair[1].swapaxes(-1, -2))
    # Every head draws vectors of its own: as many draws of the same pairs.
    many = tuple(np.tile(x, (DRAWS, 1, 1)) for x in pair)
    feature_map = build(name, 2 * DRAWS, 6, features=64)
    feature_map.adapt([many])
    found = kernel(feature_map, many).reshape(DRAWS, *exact.shape)
    error = found.std(0) / np.sqrt(DRAWS)
    # Student's t with 39 degrees of freedom, once in a million for 32 numbers.
    assert np.max(7 * error / exact) < 0.7
    assert np.all(np.abs(found.mean(0) - exact) < 7 * error + 1e-5 * exact)


@pytest.mark.once
def test_conditioning_lowers_the_variance():
    pair, errors = off_center(), {}
    exact = np.exp(pair[0] @ pair[1].swapaxes(-1, -2))
    for name in ("favorplus", "favorpp", "favorpp_dense"):
        ratios = []
        for seed in range(8):
            feature_map = build(name, 2, 6, features=64, seed=seed)
            if feature_map.is_adaptive:
                feature_map.adapt([pair])
            ratios.append(kernel(feature_map, pair) / exact)
        errors[name] = np.median(np.abs(np.array(ratios) - 1))
    assert errors["favorpp"] < 0.95 * errors["favorplus"]
    assert errors["favorpp_dense"] < 0.7 * errors["favorpp"]


@pytest.mark.parametrize("name", ADAPTIVE)
def test_redraw_keeps_the_fit_and_draws_other_vectors(name):
    feature_map = build(name)
    feature_map.adapt([h.sample()])

    def state():
        kept = {k: x for k, x in weights_of(feature_map).items() if "vec" not in k}
        return kept, h.to_numpy(feature_map.vectors).copy()

    kept, vectors = state()
    assert np.max(kept["a"]) < -0.001
    draws = feature_map.random_vectors(0)
    feature_map.redraw()
    same, others = state()
    for part in kept:
        np.testing.assert_array_equal(same[part], kept[part])
    assert np.all(vectors != others)
    assert np.all(draws != feature_map.random_vectors(1))
    assert feature_map.is_calibrated and int(h.to_numpy(feature_map.draws)) == 1
    for side in range(others.shape[1]):
        h.assert_same(others[:, side], feature_map.random_vectors(1))


@pytest.mark.parametrize(("name", "state"), STATES)
def test_weights_are_saved(name, state, tmp_path):
    def model():
        x = keras.Input((5, 8))
        layer = MultiHeadAttention(2, 4, feature_map=PRESETS[name](8, seed=1))
        return keras.Model(x, layer(x, x)), layer.feature_map

    one, feature_map = model()
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype("float32")
    drawn = h.to_numpy(h.forward(one)(x))
    feature_map.redraw()
    if state != "drawn":
        pair = np.random.default_rng(1).normal(0.5, 0.5, size=(2, 2, 30, 4))
        feature_map.adapt([tuple(pair)])
    if state == "trained":
        for weight in feature_map.trainable_variables:
            weight.assign(1.1 * weight + 0.05)
    path = str(tmp_path / "a.weights.h5")
    one.save_weights(path)
    other, loaded = model()
    other.load_weights(path)
    expected = h.to_numpy(h.forward(one)(x))
    assert np.abs(expected - drawn).max() > 1e-3
    h.assert_same(h.forward(other)(x), expected)
    assert loaded.is_calibrated == feature_map.is_calibrated == (state != "drawn")
    if state == "trained":
        return
    # Another draw of the copy keeps its fit too.
    feature_map.redraw()
    loaded.redraw()
    h.assert_same(loaded.vectors, feature_map.vectors)
    h.assert_same(h.forward(other)(x), h.forward(one)(x))


@slow_on_jax
def test_calibrated_models_are_saved_and_restored(tmp_path):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((20, 8))
    layer = keras.layers.MultiHeadAttention(2, 6, name="attention")
    model = keras.Model(inputs, layer(inputs, inputs, use_causal_mask=True))
    x = np.random.default_rng(0).normal(size=(4, 20, 8)).astype("float32") * 2
    softmax = model.predict(x, verbose=0)
    keras_rfattn.replace_attention(model, "favorpp_dense", num_features=512, seed=0)
    assert "uncalibrated" in str(keras_rfattn.describe_attention(model))
    keras_rfattn.calibrate(model, [x])
    assert "uncalibrated" not in str(keras_rfattn.describe_attention(model))
    linear = model.predict(x, verbose=0)
    path = str(tmp_path / "model.keras")
    model.save(path)
    h.assert_same(keras.saving.load_model(path).predict(x, verbose=0), linear)
    error = np.linalg.norm(linear - softmax) / np.linalg.norm(softmax)
    assert 0 < error < 0.3
    keras_rfattn.restore_attention(model)
    h.assert_same(model.predict(x, verbose=0), softmax)


# --- Binding


@pytest.mark.parametrize("kind", ["left", "middle", "scattered"])
@pytest.mark.parametrize("name", BOUND)
def test_padding_binds_nothing(name, kind):
    feature_map, x, mask = build(name), h.problem(), h.padding_masks()[kind]
    hidden = ~mask[:, :, None, None]
    spoiled = [np.where(hidden, np.float32("nan"), a) for a in x]
    found = attention_of(feature_map, spoiled, mask=mask)
    for row, seen in enumerate(mask):
        alone = [a[row : row + 1, seen] for a in x]
        expected = attention_of(feature_map, alone)
        h.assert_close(found[row : row + 1, seen], expected)
        weights = bound_weights(feature_map, *(SIDE * a[0] for a in alone[:2]))
        query, key, value = (a[0] for a in alone)
        expected = oracle(SIDE * query, SIDE * key, value, weights, False)
        h.assert_close(found[row, seen], expected)


@pytest.mark.parametrize("name", BOUND)
def test_rows_are_bound_one_by_one(name):
    feature_map, x = build(name), h.problem()
    loud = [np.concatenate([a[:1], 3 * a[1:]]) for a in x[:2]]
    found = attention_of(feature_map, [*loud, x.value])
    h.assert_close(found[:1], attention_of(feature_map, [a[:1] for a in x]))
    h.assert_close(
        found[1:], attention_of(feature_map, [*(a[1:] for a in loud), x.value[1:]])
    )


@pytest.mark.parametrize("name", BOUND)
def test_only_self_attention_that_sees_everything_is_bound(name):
    feature_map, x = build(name), h.problem()
    plain = build("favorplus")
    tensors = [ops.convert_to_tensor(a) for a in x]
    cases = [(True, False), (False, False), (True, True), (False, True)]
    for is_self, is_causal in cases:
        mask = AttentionMask(causal=is_causal, self_attention=is_self)
        found, expected = (
            h.to_numpy(attend(*tensors, m, mask)) for m in (feature_map, plain)
        )
        if is_self and not is_causal:
            assert np.abs(found - expected).max() > 1e-2 * np.abs(expected).max()
        else:
            h.assert_close(found, expected)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_calibrated_map_is_bound_to_no_sequence(name):
    feature_map, x = build(name), h.problem()
    feature_map.adapt([h.sample()])
    tensors = [ops.convert_to_tensor(a) for a in x]
    itself, cross = (
        h.to_numpy(attend(*tensors, feature_map, AttentionMask(self_attention=s)))
        for s in (True, False)
    )
    h.assert_same(itself, cross)
    # Nor does what a query gives depend on other queries.
    changed = x.query.copy()
    changed[:, 5:] *= 3
    found = attention_of(feature_map, x._replace(query=changed))
    h.assert_close(found[:, :5], itself[:, :5], 1e-5)


def traced(function, *arrays):
    """The result of a function of arrays of rows, which a program traces."""
    backend = keras.backend.backend()
    tensors = [ops.convert_to_tensor(x) for x in arrays]
    if backend == "jax":
        import jax

        mapped = jax.vmap(lambda *rows: function(*(x[None] for x in rows))[0])
        return [jax.jit(function)(*tensors), mapped(*tensors)]
    if backend == "tensorflow":
        import tensorflow as tf

        shapes = [tf.TensorSpec([None, None, *x.shape[2:]], x.dtype) for x in tensors]
        return [
            tf.function(function)(*tensors),
            tf.function(function, input_signature=shapes)(*tensors),
        ]
    import torch

    mapped = torch.vmap(lambda *rows: function(*(x[None] for x in rows))[0])
    return [mapped(*tensors)]


@pytest.mark.parametrize("is_calibrated", [False, True])
@pytest.mark.parametrize("name", BOUND)
def test_programs_bind_as_calls_do(name, is_calibrated):
    feature_map, x = build(name), h.problem()
    if is_calibrated:
        feature_map.adapt([h.sample()])
    mask = AttentionMask(self_attention=True)

    def call(*tokens):
        return attend(*tokens, feature_map, mask)

    expected = h.to_numpy(call(*(ops.convert_to_tensor(a) for a in x)))
    for found in traced(call, *x):
        h.assert_close(found, expected)


@pytest.mark.parametrize("name", BOUND)
def test_a_program_made_before_calibration_binds_as_after(name):
    # Whether the map is calibrated is a weight, which programs may take as an argument.
    x = keras.Input((6, 8))
    layer = MultiHeadAttention(2, 4, feature_map=PRESETS[name](8, seed=0))
    model = keras.Model(x, layer(x, x))
    run = h.forward(model)
    data = np.random.default_rng(0).normal(size=(2, 6, 8)).astype("float32")
    before = h.to_numpy(run(data))
    h.assert_close(before, model(data))
    keras_rfattn.calibrate(model, [2 * data], verbose=0)
    after = h.to_numpy(run(data))
    h.assert_close(after, model(data))
    assert np.abs(after - before).max() > 1e-3 * np.abs(before).max()


@functools.cache
def layer(self_attention, name="favorpp"):
    keras.utils.set_random_seed(0)
    arguments = {"feature_map": name, "num_features": 8, "seed": 0}
    made = MultiHeadAttention(2, 8, self_attention=self_attention, **arguments)
    made.build((None, None, 16), (None, None, 16))
    return made


@pytest.mark.parametrize("name", BOUND)
def test_one_layer_in_self_and_in_cross_attention(name):
    generator = np.random.default_rng(0)
    x, other = (
        ops.convert_to_tensor(2 * generator.normal(size=(2, 12, 16)).astype("float32"))
        for _ in range(2)
    )
    made = layer(None, name)
    plain = h.to_numpy(layer(False, "favorplus")(x, other))
    for _ in range(2):
        # The order of calls changes nothing.
        h.assert_close(made(x, x), layer(True, name)(x, x))
        h.assert_close(made(x, other), layer(False, name)(x, other))
        h.assert_close(made(x, other), plain)
    difference = h.to_numpy(layer(True, name)(x, x)) - h.to_numpy(
        layer(False, name)(x, x)
    )
    assert np.abs(difference).max() > 1e-3


@pytest.mark.parametrize("name", BOUND)
def test_gradients_of_a_bound_call_hold_its_statistic_fixed(name):
    feature_map, x = build(name), h.problem(length=9, dtype="float64")
    mask = AttentionMask(self_attention=True)
    generator = np.random.default_rng(6)
    step, direction = 1e-5, [generator.normal(size=a.shape) for a in x]

    with h.double_precision():
        tensors = [ops.convert_to_tensor(a) for a in x]
        bound = feature_map.bind(*tensors[:2], SIDE)

        def call(query, key, value):
            return attend(query, key, value, feature_map, mask)

        def fixed(query, key, value):
            features = bound.query_features(query), bound.key_features(key)
            return bidirectional(*features, value)

        h.assert_close(call(*tensors), fixed(*tensors), 1e-10)
        gradients = h.gradients(call, *x)
        weights = np.cos(np.arange(np.prod(call(*tensors).shape)))

        def slope(function):
            ends = [
                function(*(ops.convert_to_tensor(a + s * step * d) for a, d in
                           zip(x, direction, strict=True)))
                for s in (1, -1)
            ]  # fmt: skip
            ends = [np.sum(h.to_numpy(y).ravel() * weights) for y in ends]
            return (ends[0] - ends[1]) / (2 * step)

        found = sum(np.sum(a * d) for a, d in zip(gradients, direction, strict=True))
        h.assert_close(np.array(found), np.array(slope(fixed)), 1e-6)
        # The statistic moves too, which is no part of the gradient.
        assert abs(slope(call) / found - 1) > 1e-4


# --- Folded weights


def log_attention(query, key, value, weights, is_causal):
    """`oracle` by the logarithms of features, where features overflow."""
    features = documented(SimpleNamespace(exp=lambda x: x, log=np.log, sqrt=np.sqrt))[0]
    query, key, value = (x.astype("float64") for x in (query, key, value))
    output = np.zeros((*query.shape[:2], value.shape[-1]))
    for head in range(query.shape[1]):
        k = head // (query.shape[1] // key.shape[1])
        log_q, log_k = features(
            query[:, head], key[:, k], *(weights[x][k] for x in ARGUMENTS)
        )
        logs = log_q[:, None] + log_k[None]
        if is_causal:
            logs = np.where(np.tri(len(query), dtype=bool)[..., None], logs, -np.inf)
        sums = np.exp(logs - logs.max(axis=(1, 2), keepdims=True)).sum(-1)
        output[:, head] = sums @ value[:, k] / sums.sum(-1, keepdims=True)
    return output


def far_from_center(norms, condition, length=30):
    """A map with centers of these norms and matrices of a condition number, and tokens.

    Conditioned tokens have the usual size, and no key outweighs all others.
    """
    feature_map, generator = build("favorpp_learned"), np.random.default_rng(8)
    feature_map.adapt([h.sample()])
    heads, dim = h.KV_HEADS, h.HEAD_DIM
    turns = np.linalg.qr(generator.normal(size=(2, heads, dim, dim)))[0]
    sizes = np.geomspace(condition**-0.5, condition**0.5, dim)
    matrix = (turns[0] * sizes) @ turns[1]
    inverse = np.linalg.inv(matrix)
    centers = generator.normal(size=(2, heads, dim))
    centers /= np.linalg.norm(centers, axis=-1, keepdims=True)
    centers *= np.reshape(norms, (2, 1, 1))
    both = np.stack([matrix, inverse.swapaxes(-1, -2)], axis=1)
    feature_map.matrices.assign(both)
    feature_map.centers.assign(centers.swapaxes(0, 1))
    query = 0.5 * generator.normal(size=(length, h.HEADS, dim))
    key = 0.5 * generator.normal(size=(length, heads, dim))
    # The center of queries would make some keys far likelier than others.
    along = np.einsum("khi,ki->kh", matrix, centers[0])
    along /= np.linalg.norm(along, axis=-1, keepdims=True)
    key = key - np.einsum("tkh,kh->tk", key, along)[..., None] * along
    query = np.einsum("nhi,tni->tnh", np.repeat(inverse, GROUPS, 0), query)
    query = query + np.repeat(centers[0], GROUPS, 0)
    key = np.einsum("kih,tki->tkh", matrix, key) + centers[1]
    value = generator.normal(size=(length, heads, h.VALUE_DIM))
    return feature_map, [x.astype("float32") for x in (query, key, value)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("norms", "condition"),
    [((100, 0.1), 1), ((0.1, 100), 1), ((1, 1), 1e3), ((100, 100), 1e3)],
)
def test_folded_weights_are_as_exact_as_the_tokens(norms, condition, is_causal):
    feature_map, tokens = far_from_center(norms, condition)
    weights, (query, key, value) = weights_of(feature_map), tokens
    mask = AttentionMask(causal=is_causal, self_attention=True)
    found = attend(
        *(ops.convert_to_tensor(x[None]) for x in tokens), feature_map, mask, scale=1.0
    )
    expected = log_attention(query, key, value, weights, is_causal)
    # How much the output changes with the last bit of each token, which float32 rounds.
    generator, changes = np.random.default_rng(0), []
    for _ in range(3):
        near = (
            x * (1 + 2.0**-24 * generator.choice([-1, 1], size=x.shape))
            for x in (query.astype("float64"), key.astype("float64"))
        )
        changed = log_attention(*near, value, weights, is_causal)
        changes.append(np.abs(changed - expected).max() / np.abs(expected).max())
    # Sums of 24 products round some more often than their terms.
    rtol = max(1e-5, 8 * max(changes))
    assert rtol < 1e-3
    h.assert_close(h.to_numpy(found)[0], expected, rtol)


# --- The exponent that all features of a query share


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("name", "state"), STATES)
def test_attention_needs_no_common_exponent_of_queries(name, state, is_causal):
    feature_map, x = in_state(name, state), h.problem()
    query, key, value = (ops.convert_to_tensor(a) for a in x)
    query, key = h.featurized(feature_map, query, key, SIDE, causal=is_causal)
    without = query.relative()
    a, b = (h.to_numpy(f.dense().log_scale) for f in (query, without))
    shared = a - b
    assert np.ptp(shared, axis=-1).max() < 1e-4 and np.ptp(shared) > 1
    algorithm = functools.partial(causal, block_size=8) if is_causal else bidirectional
    call = h.one_program(algorithm)
    expected = h.reference(query, key, x.value, causal=is_causal)
    for features in (query, without, query.dense(), without.dense()):
        h.assert_close(call(features, key, value), expected.output)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("options", [{"sliding": True}, {"sinks": 2}])
@pytest.mark.parametrize("state", ["calibrated", "drawn"])
def test_windows_weigh_features_as_they_weigh_the_kernel(state, options, is_causal):
    # There the common exponents of queries count.
    feature_map = in_state("favorpp_learned", state)
    x = h.problem(size=0.5)
    found = attention_of(
        feature_map, x, is_causal, options=Options(window=5, **options)
    )
    tokens = np.arange(h.LENGTH) // 5
    ahead = tokens[None] - tokens[:, None]
    is_sliding = options.get("sliding", False)
    near = (ahead >= -int(is_sliding)) & (ahead <= int(is_sliding and not is_causal))
    near = near | (np.arange(h.LENGTH) < options.get("sinks", 0))
    near = np.broadcast_to(near, (h.BATCH, *near.shape))
    visible = np.ones_like(near) & (np.tri(h.LENGTH, dtype=bool) | (not is_causal))
    query, key, value = (ops.convert_to_tensor(a) for a in x)
    query, key = SIDE * query, SIDE * key
    expected = weighed(feature_map, query, key, value, near, visible)
    h.assert_close(found, expected)
    # Features alone, or the window alone, would give something else.
    for changed in (visible & ~near, near & visible):
        other = weighed(feature_map, query, key, value, near, changed)
        assert np.abs(h.to_numpy(other) - found).max() > 1e-2 * np.abs(found).max()


# --- What PyTorch keeps of a fold


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="of PyTorch")
@pytest.mark.parametrize("kind", ["assign", "in place", "data", "inference"])
def test_no_change_of_a_weight_is_missed(kind):
    import torch

    feature_map = in_state("favorpp_learned", "calibrated")
    with torch.inference_mode() if kind == "inference" else torch.no_grad():
        before = attention_of(feature_map, h.problem())
        np.testing.assert_array_equal(attention_of(feature_map, h.problem()), before)
        for weight in feature_map.trainable_variables:
            value = weight.value
            if kind == "assign":
                weight.assign(1.5 * h.to_numpy(weight))
            elif kind == "data":
                value.data.mul_(1.5)
            else:
                value.mul_(1.5)
            after = attention_of(feature_map, h.problem())
            other = in_state("favorpp_learned", "calibrated")
            for mine, its in zip(other.weights, feature_map.weights, strict=True):
                mine.assign(h.to_numpy(its).copy())
            np.testing.assert_array_equal(after, attention_of(other, h.problem()))
            # The bias, all zeros, stays as it is.
            assert weight.name == "bias" or np.abs(after - before).max() > 1e-5
            before = after

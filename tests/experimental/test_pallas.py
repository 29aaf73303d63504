"""The kernels for TPUs, in JAX's interpreter of them, against all pairs of tokens.

It fills memory with NaN, refuses to read beyond it, and looks for races.
"""

import keras
import numpy as np
import pytest
from keras import ops

import keras_rfattn
from keras_rfattn.layers.attend import attend
from keras_rfattn.ops import AttentionMask, Options, quadratic
from tests import helpers as h

on_jax = pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="Pallas is a part of JAX"
)


def arrays(length=20, batch=1, seed=0):
    shapes = [(batch, length, n, 8) for n in (2, 1, 1)]
    generator = np.random.default_rng(seed)
    return [generator.normal(size=shape).astype("float32") for shape in shapes]


def build(name="favorpp"):
    return h.build(name, kv_heads=1, head_dim=8, num_features=16)


def fused(feature_map, tokens, mask, **window):
    """Attention by the kernels, in blocks of 16 tokens."""
    options = Options(implementation="pallas", block_size=16, **window)
    return attend(*tokens, feature_map, mask, options=options)


def wanted(feature_map, tokens, mask):
    """The same by all pairs of tokens."""
    query, key, value = tokens
    side = feature_map.default_scale(8) ** 0.5
    features = h.featurized(feature_map, query, key, side, causal=True)
    return quadratic(*features, value, mask.key_mask, mask.causal)


def interpreted(function, *arguments):
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call
    from jax.experimental.pallas import tpu

    params = tpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise"
    )
    with tpu.force_tpu_interpret_mode(params):
        found = function(*arguments)
    assert not interpret_pallas_call.races.races_found
    return found


@on_jax
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "causal"), [("favorpp_learned", True), ("favorpp", False)]
)
def test_outputs_and_gradients(name, causal):
    import jax

    feature_map, tokens = build(name), arrays()
    visible = np.ones((1, 20), bool)
    visible[0, [0, 1, 9, 18]] = False
    # Its statistics come from the sequence where attention is not causal.
    mask = AttentionMask(visible, causal=causal)
    weight = np.random.default_rng(1).normal(size=tokens[0].shape)

    def loss(attention, tokens):
        return ops.sum(attention(feature_map, tokens, mask) * weight.astype("float32"))

    def both(attention):
        return jax.value_and_grad(lambda x: loss(attention, x))(tokens)

    found, gradients = interpreted(both, fused)
    expected, others = both(wanted)
    h.assert_close(found, expected, 1e-5)
    for x, y in zip(gradients, others, strict=True):
        h.assert_close(x, y, 1e-5)


@on_jax
@pytest.mark.full
@pytest.mark.parametrize("name", ["favorplus", "favorpp_dense"])
def test_every_map_and_what_is_not_finite(name):
    feature_map, tokens, mask = build(name), arrays(batch=2), AttentionMask(causal=True)
    expected = h.to_numpy(wanted(feature_map, tokens, mask))
    tokens[2][0, 5] = np.nan
    tokens[1][1, 7] = np.inf
    found = h.to_numpy(interpreted(fused, feature_map, tokens, mask))
    spoiled = np.isnan(found).any(axis=(2, 3))
    assert np.array_equal(spoiled, np.arange(20) >= np.array([[5], [7]]))
    for row, last in ((0, 5), (1, 7)):
        h.assert_close(found[row, :last], expected[row, :last], 1e-5)


@on_jax
@pytest.mark.full
def test_a_key_far_above_all_before_it():
    feature_map, tokens = build("favorplus"), arrays()
    # Exponents of hundreds, in the middle of a block: more than its product can hold.
    tokens[1][0, 6] *= 60
    mask = AttentionMask(causal=True)
    found = interpreted(fused, feature_map, tokens, mask)
    h.assert_close(found, wanted(feature_map, tokens, mask), 1e-4)


@on_jax
@pytest.mark.full
def test_the_future_changes_nothing():
    feature_map, mask = build(), AttentionMask(causal=True)
    tokens = arrays()
    expected = h.to_numpy(interpreted(fused, feature_map, tokens, mask))
    changed = [np.concatenate([x[:, :11], 9 * x[:, 11:]], axis=1) for x in tokens]
    found = h.to_numpy(interpreted(fused, feature_map, changed, mask))
    assert np.array_equal(found[:, :11], expected[:, :11])
    assert not np.array_equal(found[:, 11:], expected[:, 11:])


def windowed(feature_map, tokens, mask, size, sliding):
    """Exact nearby and by features beyond, by all pairs of tokens of one row."""
    query, key, value = tokens
    visible, side = mask.key_mask, feature_map.default_scale(8) ** 0.5
    query, key = query * side, key * side
    far = ops.einsum(
        "btnm,bskm->btns",
        *(ops.exp(f(x).dense().log_scale) for f, x in (
            (feature_map.query_features, query), (feature_map.key_features, key)
        )),
    )  # fmt: skip
    near = ops.exp(ops.einsum("btnh,bskh->btns", query, key))
    place = np.arange(value.shape[1]) - np.flatnonzero(visible[0])[0]
    # Where not causal, what is before the first visible key lies behind the end.
    window = place % len(place) // size
    apart = np.abs(window[:, None] - window[None])
    is_near = apart <= (1 if sliding else 0)
    seen = np.broadcast_to(visible, apart.shape)
    if mask.causal:
        seen = seen & (place[:, None] >= place[None])
    weights = ops.where(is_near[None, :, None], near, far) * seen[None, :, None]
    # The gradient divides by the square of the total, which must not underflow.
    total = ops.maximum(ops.sum(weights, axis=-1, keepdims=True), 1e-12)
    return ops.einsum("btns,bsv->btnv", weights / total, value[:, :, 0])


@on_jax
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "causal", "size", "sliding"),
    [
        ("favorpp_dense", True, 5, True),
        ("favorpp", False, 16, True),
        ("favorplus", False, 5, False),
        ("favorpp_learned", True, 16, False),
    ],
)
def test_windows(name, causal, size, sliding):
    import jax

    feature_map, tokens = build(name), arrays(40)
    visible = np.ones((1, 40), bool)
    visible[0, [0, 1, 9, 18, 39]] = False
    mask = AttentionMask(visible, causal=causal, self_attention=True)
    weight = np.random.default_rng(1).normal(size=tokens[0].shape).astype("float32")

    def both(attention, *window):
        def loss(tokens):
            output = attention(tokens, *window)
            return ops.sum(output * weight), output

        return jax.value_and_grad(loss, has_aux=True)(tokens)

    def by_kernels(tokens):
        return fused(feature_map, tokens, mask, window=size, sliding=sliding)

    def by_pairs(tokens):
        return windowed(feature_map, tokens, mask, size, sliding)

    (_, found), gradients = interpreted(both, by_kernels)
    (_, expected), others = both(by_pairs)
    for x, y in zip((found, *gradients), (expected, *others), strict=True):
        h.assert_close(x, y, 1e-5)


@on_jax
@pytest.mark.full
def test_windows_keep_the_future_and_what_is_not_finite_away():
    feature_map, mask = build(), AttentionMask(causal=True, self_attention=True)
    tokens = arrays(40)

    def attention(tokens):
        return h.to_numpy(
            interpreted(lambda: fused(feature_map, tokens, mask, window=16))
        )

    expected = attention(tokens)
    changed = [np.concatenate([x[:, :21], 9 * x[:, 21:]], axis=1) for x in tokens]
    changed[2][0, 30] = np.nan
    found = attention(changed)
    assert np.array_equal(found[:, :21], expected[:, :21])
    assert not np.array_equal(found[:, 21:30], expected[:, 21:30])
    spoiled = np.isnan(found).any(axis=(0, 2, 3))
    assert np.array_equal(spoiled, np.arange(40) >= 30)


@on_jax
@pytest.mark.full
@pytest.mark.parametrize("window", [{}, {"window": 16}], ids=["all", "window"])
def test_bfloat16_is_as_near_as_without_kernels(window):
    import jax

    feature_map = build()
    rounded = [ops.cast(x, "bfloat16") for x in arrays(40)]
    mask = AttentionMask(causal=True, self_attention=True)
    weight = np.random.default_rng(1).normal(size=rounded[0].shape).astype("float32")

    def both(attention, tokens):
        def loss(tokens):
            output = ops.cast(attention(tokens), "float32")
            return ops.sum(output * weight), output

        (_, output), gradients = jax.value_and_grad(loss, has_aux=True)(tokens)
        return [ops.cast(x, "float32") for x in (output, *gradients)]

    def plain(tokens):
        return attend(*tokens, feature_map, mask, options=Options(**window))

    def by_kernels(tokens):
        return fused(feature_map, tokens, mask, **window)

    exact = both(plain, [ops.cast(x, "float32") for x in rounded])
    found = interpreted(both, by_kernels, rounded)
    for x, y, z in zip(found, both(plain, rounded), exact, strict=True):
        errors = [float(ops.norm(a - z) / ops.norm(z)) for a in (x, y)]
        # Half a unit in the last place of a bfloat16 is 0.002 of it.
        assert errors[0] < 1.5 * errors[1] + 0.002


def model():
    inputs = keras.Input((8, 16))
    layer = keras.layers.MultiHeadAttention(2, 8)
    return keras.Model(inputs, layer(inputs, inputs))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"feature_map": "elu"}, "features of 'elu' are not exponentials"),
        ({"feature_map": "polysketch", "window": 4}, "features of 'polysketch' are"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(arguments, reason):
    if keras.backend.backend() != "jax":
        reason = f"run on JAX, not on the backend {keras.backend.backend()!r}"
    softmax = model()
    arguments = {"feature_map": "favorpp", **arguments}
    with pytest.raises(ValueError, match=reason):
        keras_rfattn.replace_attention(softmax, implementation="pallas", **arguments)
    assert not keras_rfattn.describe_attention(softmax).replaced


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="`implementation` must be one of"):
        Options(implementation="cuda")


def test_the_report_tells_of_kernels_that_were_asked_for():
    linear = keras_rfattn.replace_attention(model(), "favorpp", num_features=8, seed=0)
    assert "computed by" not in str(keras_rfattn.describe_attention(linear))
    if keras.backend.backend() == "jax":
        keras_rfattn.restore_attention(linear)
        keras_rfattn.replace_attention(
            linear, "favorpp", num_features=8, seed=0, implementation="pallas"
        )
        lines = str(keras_rfattn.describe_attention(linear))
        assert "computed by pallas as asked" in " ".join(lines.split())

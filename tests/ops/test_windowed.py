"""Exact windows against their definition: every weight one by one."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_rfattn.layers.attend import attend
from keras_rfattn.ops import AttentionMask, Options, Polynomial, Softmax
from keras_rfattn.ops.kernel_attention import exact_attention
from keras_rfattn.ops.windows import Local, local_attention
from tests import helpers as h
from tests.feature_maps.cases import case
from tests.marks import SLOW_ON_JAX
from tests.ops.definition import weighed

EXACT = FORMS = h.FORMS
SOME = ("favor", "favorpp", "polysketch_learned")
SHAPES = [(causal, sliding) for causal in (True, False) for sliding in (True, False)]


def scaled(feature_map, name, query, key):
    side = feature_map.default_scale(h.HEAD_DIM) ** 0.5 * case(name).size
    return query * side, key * side


def local(name, window, sliding, causal, mask=None, in_memory=False):
    """`(query, key, value) -> output`, of unscaled arrays."""
    feature_map = h.build(name)

    def call(query, key, value):
        query, key = scaled(feature_map, name, query, key)
        features = feature_map.query_features(query), feature_map.key_features(key)
        if in_memory:
            features = [x.dense() for x in features]
        where = Local(query, key, feature_map.exact_kernel, window, sliding)
        visible = None if mask is None else ops.convert_to_tensor(mask)
        return local_attention(*features, value, where, visible, causal)

    return call


def definition(name, window, sliding, causal, mask=None):
    """The same by a matrix of weights."""
    feature_map = h.build(name)
    mask = np.ones((h.BATCH, h.LENGTH), bool) if mask is None else mask

    tokens = np.arange(h.LENGTH)
    first = mask.argmax(axis=1)[:, None]
    # Not causal, rows before the first visible key count as after the end.
    own = ((tokens - first) % h.LENGTH) // window
    ahead = own[:, None, :] - own[:, :, None]
    near = (ahead <= 0 if causal else ahead <= sliding) & (ahead >= -int(sliding))
    visible = np.broadcast_to(mask[:, None, :], near.shape)
    if causal:
        visible = visible & np.tri(h.LENGTH, dtype=bool)

    def call(query, key, value):
        query, key = scaled(feature_map, name, query, key)
        return weighed(feature_map, query, key, value, near, visible)

    return call


def small_problem():
    """Logits so small that features of any map are of use."""
    x = h.problem(size=0.5)
    return [ops.convert_to_tensor(a) for a in x]


@pytest.mark.parametrize("kind", ["left", "scattered"])
@pytest.mark.parametrize(("name", "shape"), h.over(SHAPES, EXACT))
def test_matches_the_definition(name, shape, kind):
    causal, sliding = shape
    mask = h.padding_masks()[kind]
    x = small_problem()
    actual = h.to_numpy(local(name, 5, sliding, causal, mask)(*x))
    h.assert_close(actual, definition(name, 5, sliding, causal, mask)(*x))
    blind = np.cumsum(mask, axis=1) == 0
    assert kind != "left" or blind.any()
    assert not causal or np.all(actual[blind] == 0)


@pytest.mark.full
@pytest.mark.parametrize(("causal", "sliding"), SHAPES)
@pytest.mark.parametrize("window", [1, 4, 36])
def test_any_window(window, causal, sliding):
    x = small_problem()
    for in_memory in (True, False):
        actual = local("favorpp", window, sliding, causal, in_memory=in_memory)(*x)
        expected = definition("favorpp", window, sliding, causal)(*x)
        h.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    # On JAX by default each form and each shape once.
    [
        pytest.param(name, shape, "left", marks=() if i == j else SLOW_ON_JAX)
        for i, name in enumerate(FORMS)
        for j, shape in enumerate(SHAPES)
    ]
    + [pytest.param("favorpp", x, "full", marks=SLOW_ON_JAX) for x in SHAPES],
)
def test_gradients_match_the_definition(name, shape, kind):
    causal, sliding = shape
    mask = h.padding_masks()[kind]
    x = [h.to_numpy(a) for a in small_problem()]
    actual = h.gradients(local(name, 11, sliding, causal, mask), *x)
    expected = h.gradients(definition(name, 11, sliding, causal, mask), *x)
    for a, e in zip(actual, expected, strict=True):
        h.assert_close(a, e, 1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_a_window_as_long_as_the_sequence_is_exact(name, causal):
    x, mask = small_problem(), h.padding_masks()["middle"]
    actual = local(name, h.LENGTH, False, causal, mask)(*x)
    query, key = scaled(h.build(name), name, *x[:2])
    visible = ops.convert_to_tensor(mask)
    if h.build(name).kernel == "softmax":
        expected = exact_attention(query, key, x[2], Softmax(), visible, causal)
    else:
        kernel = Polynomial(h.build(name).degree)
        expected = exact_attention(query, key, x[2], kernel, visible, causal)
    h.assert_same(actual, expected)


@pytest.mark.parametrize(("disturbance", "kind"), [(100.0, "left"), (1e12, "full")])
@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_the_future_does_not_matter(name, sliding, disturbance, kind):
    x = [h.to_numpy(a) for a in small_problem()]
    call = local(name, 5, sliding, True, h.padding_masks()[kind])
    expected = h.to_numpy(call(*(ops.convert_to_tensor(a) for a in x)))
    # At the start of a window, and within.
    for token in (10, 33):
        disturbed = [a.copy() for a in x]
        for a in disturbed[1:]:
            a[:, token:] *= disturbance
        output = h.to_numpy(call(*(ops.convert_to_tensor(a) for a in disturbed)))
        h.assert_same(output[:, :token], expected[:, :token])


@pytest.mark.full
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3]])
@pytest.mark.parametrize("name", FORMS)
def test_hidden_keys_may_hold_anything(name, shape):
    causal, sliding = shape
    x, mask = [h.to_numpy(a) for a in small_problem()], h.padding_masks()["scattered"]
    spoiled = [x[0], *(np.where(mask[:, :, None, None], a, np.nan) for a in x[1:])]
    feature_map, visible = h.build(name), ops.convert_to_tensor(mask)

    def call(query, key, value):
        query, key = scaled(feature_map, name, query, key)
        features = feature_map.query_features(query), feature_map.key_features(key)
        where = Local(query, key, feature_map.exact_kernel, 5, sliding)
        return local_attention(*features, value, where, visible, causal)

    h.assert_same(
        call(*(ops.convert_to_tensor(a) for a in spoiled)),
        call(*(ops.convert_to_tensor(a) for a in x)),
    )
    gradient = h.to_numpy(h.gradients(call, *spoiled)[0])
    h.assert_close(gradient, h.gradients(call, *x)[0])


@pytest.mark.parametrize("sliding", [False, True])
def test_windows_begin_at_the_first_visible_key(sliding):
    query, key, value = (h.to_numpy(a) for a in small_problem())
    mask = np.ones((h.BATCH, h.LENGTH), bool)
    mask[:, :7] = False
    padded = local("favorplus", 5, sliding, True, mask)
    plain_ = local("favorplus", 5, sliding, True)
    output = padded(*(ops.convert_to_tensor(a) for a in (query, key, value)))
    short = plain_(*(ops.convert_to_tensor(a[:, 7:]) for a in (query, key, value)))
    h.assert_close(h.to_numpy(output)[:, 7:], short)


@pytest.mark.full
@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("name", SOME)
def test_token_by_token_is_the_parallel_pass(name, sliding):
    feature_map = h.build(name)
    query, key, value = small_problem()
    visible = np.ones((h.BATCH, h.LENGTH), bool)
    visible[0, :3] = False
    options = {"options": Options(window=5, sliding=sliding)}
    mask = AttentionMask(ops.convert_to_tensor(visible), causal=True)
    expected = h.to_numpy(attend(query, key, value, feature_map, mask, **options))
    for i in (0, 7, 8, 36):
        mask = AttentionMask(ops.convert_to_tensor(visible), causal=True, offset=i)
        one = attend(query[:, i : i + 1], key, value, feature_map, mask, **options)
        h.assert_close(one, expected[:, i : i + 1])
        hidden = mask.replace(query_mask=ops.convert_to_tensor([[False], [True]]))
        one = attend(query[:, i : i + 1], key, value, feature_map, hidden, **options)
        h.assert_close(one[1], expected[1, i : i + 1])
        assert not h.to_numpy(one[0]).any()


def test_cross_attention_has_no_windows():
    query, key, value = small_problem()
    with pytest.raises(ValueError, match="`window` needs self-attention"):
        attend(
            query[:, :9], key, value, h.build("favorplus"), options=Options(window=5)
        )


@pytest.mark.parametrize("window", [0, -1, 2.0, True])
def test_window_must_be_a_positive_integer(window):
    with pytest.raises(ValueError, match="`window` must be a positive number"):
        local("favorplus", window, False, True)(*small_problem())


def test_kernels_are_what_they_say():
    generator = np.random.default_rng(0)
    query, key = generator.normal(size=(2, 3, 8)), generator.normal(size=(2, 4, 8))
    products = np.einsum("brh,bsh->brs", query, key)
    visible = np.ones((3, 4), bool)
    for kernel, expected in (
        (Softmax(), np.exp(products)),
        (Polynomial(4), products**4),
    ):
        arrays = (ops.convert_to_tensor(a.astype("float32")) for a in (query, key))
        weights, shift = kernel(*arrays, ops.convert_to_tensor(visible))
        actual = h.to_numpy(weights) * np.exp(h.to_numpy(shift))[..., None]
        h.assert_close(actual, expected)
        assert kernel == type(kernel)(**vars(kernel))


def test_polynomial_of_zero_and_of_huge_tokens():
    x = h.problem(length=4, kv_heads=h.HEADS)
    for size in (0.0, 1e20):
        arrays = [size * x.query, size * x.key, x.value]
        output = h.gradients(
            lambda *a: exact_attention(*a, Polynomial(4), causal=True), *arrays
        )
        assert all(np.all(np.isfinite(h.to_numpy(a))) for a in output)
    assert keras.backend.standardize_dtype(x.query.dtype) == "float32"


@pytest.mark.parametrize("name", ["relu", "elu"])
def test_a_window_needs_a_kernel(name):
    x = [ops.convert_to_tensor(a) for a in h.problem()]
    with pytest.raises(ValueError, match="`window` must be"):
        mask = AttentionMask(self_attention=True)
        attend(*x, h.build(name), mask=mask, options=Options(window=4))

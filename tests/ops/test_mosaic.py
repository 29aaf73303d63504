"""The Mosaic GPU kernels, in JAX's interpreter of them, against all pairs of tokens.

The interpreter fills memory with NaN, refuses to read beyond it, and raises an error if
it finds a race.
"""

import functools

import keras
import numpy as np
import pytest

import keras_rfattn
from keras_rfattn import fused
from keras_rfattn.layers.attend import attend
from keras_rfattn.ops import AttentionMask, Features, Options, quadratic
from keras_rfattn.ops.features import LOWEST
from tests import helpers as h

IS_JAX = keras.backend.backend() == "jax"
if IS_JAX:
    import jax
    import jax.numpy as jnp

    IS_JAX = jax.__version_info__ >= fused.FIRST_JAX


def on_jax(test):
    reason = "Mosaic GPU's interpreter is a part of JAX 0.12 and later"
    return pytest.mark.mosaic(pytest.mark.skipif(not IS_JAX, reason=reason)(test))


@pytest.fixture(autouse=True)
def in_the_interpreter(monkeypatch):
    monkeypatch.setenv("MOSAIC_INTERPRET", "1")


class Arguments:
    """Random arguments of the kernels, as `linear_attention` takes them."""

    def __init__(self, length=128, keys=None, groups=1, head_dim=8, width=16,
                 value_dim=8, dtype="bfloat16", wide=False):  # fmt: skip
        keys = length if keys is None else keys
        generator = np.random.default_rng(0)

        def normal(*shape):
            return jnp.asarray(generator.normal(size=shape), "float32")

        self.tokens = [
            normal(1, n, heads, head_dim).astype("float32" if wide else dtype)
            for n, heads in ((length, groups), (keys, 1))
        ]
        self.maps = [normal(1, 1, head_dim, width) / 2 for _ in range(2)]
        self.maps += [normal(1, 1, 1, width) for _ in range(2)]
        self.term = normal(1, 1, keys)
        self.value = normal(1, keys, 1, value_dim).astype(dtype)

    def arrays(self):
        return self.tokens, self.maps, self.term, self.value


@functools.cache
def program(is_causal, blocks=1):
    """Returns the kernels' attention as a program, compiled once per shape."""
    from keras_rfattn.fused.mosaic.linear import linear_attention

    def run(tokens, maps, term, value):
        tokens, maps = tuple(tokens), tuple(maps)
        return linear_attention(tokens, maps, term, value, is_causal, blocks)

    return jax.jit(run)


def run(arguments, is_causal):
    return h.to_numpy(program(is_causal)(*arguments.arrays()).astype("float32"))


def wanted(arguments, is_causal):
    """The same by all pairs of tokens, in float32."""
    query_vectors, key_vectors, query_bias, key_bias = arguments.maps
    query, key = (x.astype("float32") for x in arguments.tokens)
    precision = jax.lax.Precision.HIGHEST

    def exponents(x, vectors, bias):
        found = jnp.einsum("btnh,hm->btnm", x, vectors[0, 0], precision=precision)
        return found + bias[0, 0]

    mask = arguments.term[:, 0] > LOWEST / 2
    terms = jnp.where(mask, arguments.term[:, 0], 0)[..., None, None]
    features = (
        Features(None, exponents(query, query_vectors, query_bias)),
        Features(None, exponents(key, key_vectors, key_bias) + terms),
    )
    return quadratic(*features, arguments.value.astype("float32"), mask, is_causal)


@on_jax
def test_causal_outputs():
    arguments = Arguments()
    arguments.term = arguments.term.at[:, :, [0, 7, 64, 65]].set(LOWEST)
    found = run(arguments, True)
    assert not found[:, 0].any()
    h.assert_close(found, wanted(arguments, True), rtol=h.NARROW["bfloat16"])


@on_jax
def test_exponents_of_any_size():
    # Queries that see a key whose exponents exceed those before by hundreds are
    # computed one by one.
    arguments = Arguments()
    arguments.term = arguments.term.at[:, :, [61, 126]].add(300.0)
    found = run(arguments, True)
    h.assert_close(found, wanted(arguments, True), rtol=h.NARROW["bfloat16"])


@on_jax
def test_the_future_and_hidden_keys_change_no_bit():
    arguments, changed = Arguments(), Arguments()
    for x in (arguments, changed):
        x.term = x.term.at[:, :, 5].set(LOWEST)
    future = np.arange(128) >= 100
    future[5] = True
    changed.term = changed.term.at[:, :, 125].add(200.0)
    change = 30 * np.where(future, 1, 0)[None, :, None, None]
    query, key = changed.tokens
    # The query of the hidden key is not hidden.
    changed.tokens = [query, (key + change).astype(key.dtype)]
    changed.value = (changed.value - change).astype(changed.value.dtype)
    found, other = run(arguments, True), run(changed, True)
    assert np.array_equal(found[:, :100], other[:, :100])
    assert not np.array_equal(found[:, 100:], other[:, 100:])


@on_jax
def test_keys_of_another_length_in_float16():
    arguments = Arguments(length=20, keys=70, groups=2, width=80, dtype="float16")
    found = run(arguments, False)
    h.assert_close(found, wanted(arguments, False), rtol=h.NARROW["float16"])


@on_jax
@pytest.mark.full
def test_tokens_in_float32():
    # A map that changes its tokens gives them in float32, which is not rounded.
    arguments = Arguments(length=20, keys=20, wide=True, dtype="float16")
    arguments.tokens = [20 * x for x in arguments.tokens]
    found = run(arguments, False)
    h.assert_close(found, wanted(arguments, False), rtol=h.NARROW["float16"])


@on_jax
@pytest.mark.parametrize(
    ("is_causal", "dtype"),
    [(True, "bfloat16"), pytest.param(False, "float16", marks=pytest.mark.full)],
)
def test_gradients(is_causal, dtype):
    arguments = Arguments(length=126, groups=2, dtype=dtype)
    arguments.term = arguments.term.at[:, :, [0, 66]].set(LOWEST)
    if is_causal:
        arguments.term = arguments.term.at[:, :, 124].add(200.0)
    shape = arguments.value.shape
    weight = np.random.default_rng(1).normal(size=(*shape[:2], 2, shape[-1]))

    def gradients(attention):
        def loss(tokens, maps, term, value):
            own = Arguments.__new__(Arguments)
            own.tokens, own.maps, own.term, own.value = tokens, maps, term, value
            return jnp.sum(attention(own).astype("float32") * weight.astype("float32"))

        found = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*arguments.arrays())
        return [x.astype("float32") for x in jax.tree.leaves(found)]

    found = gradients(lambda x: program(is_causal)(*x.arrays()))
    expected = gradients(lambda x: wanted(x, is_causal))
    h.assert_gradients_close(found, expected, 2 * h.NARROW[dtype], all_clear=False)


@on_jax
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "is_causal"), [("favorpp_learned", True), ("favorpp", False)]
)
def test_feature_maps(name, is_causal):
    feature_map = h.build(name, kv_heads=2, head_dim=8, num_features=16)
    generator = np.random.default_rng(0)
    shapes = [(2, 20, heads, 8) for heads in (4, 2, 2)]
    tokens = [jnp.asarray(generator.normal(size=x), "bfloat16") for x in shapes]
    visible = np.arange(20) < np.array([[20], [9]])
    mask = AttentionMask(visible, causal=is_causal, self_attention=True)

    def output(implementation):
        options = Options(implementation=implementation)

        def call(*tokens):
            return attend(*tokens, feature_map, mask, options=options)

        return jax.jit(call)(*tokens).astype("float32")

    h.assert_close(output("mosaic"), output("xla"), rtol=h.NARROW["bfloat16"])


@on_jax
def test_what_is_refused():
    inputs = keras.Input((12, 16))
    layer = keras.layers.MultiHeadAttention(2, 8)
    model = keras.Model(inputs, layer(inputs, inputs))
    refused = {
        "without a window": ("favorpp", {"window": 4}),
        "features of 'elu' are not exponentials": ("elu", {}),
        "features of 'hedgehog' are not exponentials": ("hedgehog", {}),
    }
    for reason, (name, options) in refused.items():
        with pytest.raises(ValueError, match=reason):
            keras_rfattn.replace_attention(
                model, name, implementation="mosaic", **options
            )
    tokens = [jnp.zeros((1, 4, 1, 8))] * 3
    feature_map = h.build("favorpp", kv_heads=1, head_dim=8, num_features=16)
    with pytest.raises(ValueError, match="Received: values of dtype float32"):
        options = Options(implementation="mosaic")
        attend(*tokens, feature_map, AttentionMask(), options=options)


def test_an_environment_without_kernels_says_so(monkeypatch):
    if keras.backend.backend() != "jax":
        assert "on the backend 'jax'" in fused.obstacle("mosaic", Options())
    elif not IS_JAX:
        assert "they need JAX 0.12 or later" in fused.obstacle("mosaic", Options())
    else:
        assert fused.obstacle("mosaic", Options()) is None
        monkeypatch.delenv("MOSAIC_INTERPRET")
        monkeypatch.setattr(jax, "devices", list)
        assert fused.obstacle("mosaic", Options()) == "JAX finds no GPU here"

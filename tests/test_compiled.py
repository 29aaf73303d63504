"""What a compiled JAX program of a replaced model holds, and where it can go."""

import re

import keras
import numpy as np
import pytest
from keras_hub.models import GPT2Backbone

import keras_rfattn

if keras.backend.backend() != "jax":
    pytest.skip("reads XLA programs, of the JAX backend", allow_module_level=True)

import jax
import jax.numpy as jnp

LONG = 8192
# A positive map, a signed one, and one without exponents.
MECHANISMS = ["favorpp", "favor", "relu"]


def gpt2(length, mechanism=None):
    model = GPT2Backbone(
        vocabulary_size=50,
        num_layers=1,
        num_heads=2,
        hidden_dim=32,
        intermediate_dim=64,
        max_sequence_length=length,
        dropout=0.0,
    )
    if mechanism is not None:
        arguments = {"num_features": 16, "seed": 0}
        keras_rfattn.replace_attention(model, mechanism, **arguments)
    return model


def program(model, gradient):
    """A pure function of weights and tokens, jitted, and its arguments' shapes."""

    def forward(trainable, rest, token_ids, padding_mask):
        inputs = {"token_ids": token_ids, "padding_mask": padding_mask}
        return model.stateless_call(trainable, rest, inputs, training=gradient)

    def loss(*arguments):
        output, rest = forward(*arguments)
        return jnp.mean(jnp.square(output.astype("float32"))), rest

    tokens = jax.ShapeDtypeStruct((2, model.max_sequence_length), "int32")
    variables = model.trainable_variables, model.non_trainable_variables
    shapes = [
        [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in part] for part in variables
    ]
    function = jax.value_and_grad(loss, has_aux=True) if gradient else forward
    return jax.jit(function), (*shapes, tokens, tokens)


def values(model, seed=0):
    token_ids = np.random.default_rng(seed).integers(
        50, size=(2, model.max_sequence_length)
    )
    mask = np.ones_like(token_ids)
    mask[1, -3:] = 0
    variables = model.trainable_variables, model.non_trainable_variables
    weights = [[v.value for v in part] for part in variables]
    return (*weights, token_ids.astype("int32"), mask.astype("int32"))


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_exports_to_tpu(mechanism, gradient):
    function, shapes = program(gpt2(160, mechanism), gradient)
    exported = jax.export.export(function, platforms=["tpu"])(*shapes)
    assert exported.platforms == ("tpu",)


def square_buffers(compiled):
    """Shapes with at least two axes as long as the sequence."""
    found = set(re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", compiled.as_text()))
    return [shape for shape in found if shape.split(",").count(str(LONG)) > 1]


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_no_square_buffer(gradient):
    # KerasHub would hand a (B, T, T) mask to the layer; it must not exist either.
    function, shapes = program(gpt2(LONG, "favorpp"), gradient)
    linear = function.lower(*shapes).compile()
    function, shapes = program(gpt2(LONG), gradient)
    softmax = function.lower(*shapes).compile()

    assert square_buffers(softmax), "the search finds nothing in softmax either"
    assert not square_buffers(linear)
    square = LONG * LONG * 4
    assert softmax.memory_analysis().temp_size_in_bytes > square
    assert linear.memory_analysis().temp_size_in_bytes < square / 2


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_jit_gives_the_eager_numbers_and_traces_once(mechanism):
    model = gpt2(160, mechanism)
    function, _ = program(model, gradient=False)
    for seed in range(2):
        arguments = values(model, seed)
        actual, _ = function(*arguments)
        inputs = {"token_ids": arguments[2], "padding_mask": arguments[3]}
        expected = np.asarray(model(inputs))
        assert np.std(expected) > 0.1
        # Signed features have denominators that cancel.
        rtol = 1e-3 if mechanism == "favor" else 1e-5
        error = np.max(np.abs(np.asarray(actual) - expected))
        assert error <= rtol * np.max(np.abs(expected))
    assert function._cache_size() == 1


def test_features_of_keys_are_computed_once_for_each_kv_head():
    keras_hub = pytest.importorskip("keras_hub")
    length, width, found = 32, 16, {}
    for kv_heads in (1, 2, 4):
        model = keras_hub.models.LlamaBackbone(
            vocabulary_size=50, num_layers=1, num_query_heads=4, hidden_dim=32,
            num_key_value_heads=kv_heads, intermediate_dim=64,
        )  # fmt: skip
        keras_rfattn.replace_attention(model, "favorplus", num_features=width, seed=0)

        def forward(token_ids, model=model):
            inputs = {"token_ids": token_ids, "padding_mask": token_ids}
            return model(inputs, training=False)

        tokens = jax.ShapeDtypeStruct((1, length), "int32")
        analysis = jax.jit(forward).lower(tokens).cost_analysis()
        found[kv_heads] = analysis["transcendentals"]
    # KerasHub repeats keys and values for the query heads that share them.
    own = found[2] - found[1]
    assert own >= length * width
    assert found[4] - found[2] == pytest.approx(2 * own, rel=0.1)

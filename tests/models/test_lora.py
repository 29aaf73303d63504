"""LoRA adapters of a softmax checkpoint and of its linear model are the same files."""

import keras
import numpy as np
import pytest

import keras_rfattn
from tests.helpers import assert_close, assert_same, to_numpy
from tests.marks import first

keras_hub = pytest.importorskip("keras_hub")

TOKENS = np.random.default_rng(0).integers(1, 30, (2, 6))
INPUTS = {
    "token_ids": TOKENS,
    "segment_ids": np.zeros_like(TOKENS),
    "padding_mask": np.ones_like(TOKENS),
}
# With weights, in one layer and in several, and without.
MAPS = ["favorpp", "favorpp_learned", "elu"]


def backbone(layers=2, dim=8):
    keras.utils.set_random_seed(1)
    return keras_hub.models.BertBackbone(
        30, layers, 2, dim, 12, max_sequence_length=8, dropout=0.0
    )


def linear(model, name="favorpp"):
    options = {} if name == "elu" else {"num_features": 8}
    return keras_rfattn.replace_attention(model, name, seed=0, **options)


def adapters(model):
    return [x for x in model._flatten_layers() if getattr(x, "lora_enabled", False)]


def trained(model):
    """A model whose adapters are not 0."""
    generator = np.random.default_rng(2)
    for layer in adapters(model):
        for weight in (layer.lora_kernel_a, layer.lora_kernel_b):
            weight.assign(generator.normal(size=weight.shape))
    return model


def values(model):
    return {
        layer.path: [to_numpy(layer.lora_kernel_a), to_numpy(layer.lora_kernel_b)]
        for layer in adapters(model)
    }


def assert_equal_adapters(model, other):
    found, expected = values(model), values(other)
    assert found.keys() == expected.keys() and len(found) == 4
    for path, pair in expected.items():
        for a, b in zip(found[path], pair, strict=True):
            assert_same(a, b)


def output(model):
    return to_numpy(model(INPUTS)["sequence_output"])


@pytest.fixture
def softmax_file(tmp_path):
    model = backbone()
    model.enable_lora(2)
    trained(model).save_lora_weights(tmp_path / "softmax.lora.h5")
    return tmp_path / "softmax.lora.h5", model


@pytest.mark.parametrize("name", first(MAPS))
@pytest.mark.parametrize("enabled", ["never", "before", "after"])
def test_adapters_of_the_checkpoint_load(enabled, name, softmax_file):
    path, softmax = softmax_file
    model = backbone()
    if enabled == "before":
        model.enable_lora(2)
    before = output(linear(model, name))
    if enabled == "after":
        model.enable_lora(2)
    model.load_lora_weights(path)
    assert_equal_adapters(model, softmax)
    assert np.max(np.abs(output(model) - before)) > 1e-2
    keras_rfattn.restore_attention(model)
    assert_close(output(model), output(softmax))


@pytest.mark.parametrize("name", first(MAPS))
@pytest.mark.parametrize("enabled", ["before", "after"])
def test_adapters_of_the_linear_model_load(enabled, name, tmp_path):
    model = backbone()
    if enabled == "before":
        model.enable_lora(2)
    linear(model, name)
    if enabled == "after":
        model.enable_lora(2)
    trained(model).save_lora_weights(tmp_path / "m.lora.h5")
    for other in (backbone(), linear(backbone(), name), linear(backbone(), "elu")):
        other.load_lora_weights(tmp_path / "m.lora.h5")
        assert_equal_adapters(other, model)
    keras_rfattn.restore_attention(model)
    model.save_lora_weights(tmp_path / "restored.lora.h5")
    other = linear(backbone(), name)
    other.load_lora_weights(tmp_path / "restored.lora.h5")
    assert_equal_adapters(other, model)


def test_compiled_predictions_see_adapters(softmax_file):
    model = linear(backbone())
    model.predict(INPUTS, verbose=0)
    model.load_lora_weights(softmax_file[0])
    found = model.predict(INPUTS, verbose=0)["sequence_output"]
    assert_close(found, output(model))


@pytest.mark.parametrize("quantized", [False, True])
def test_adapters_of_keras_are_saved_with_the_fingerprint(quantized, tmp_path):
    inputs = keras.Input((6, 8))

    def make():
        attention = keras.layers.MultiHeadAttention(2, 4, name="attention")
        return linear(keras.Model(inputs, attention(inputs, inputs)))

    model, x = make(), np.random.default_rng(3).normal(size=(2, 6, 8))
    query = model.layers[1]._query_dense
    query.enable_lora(2)
    query.lora_kernel_b.assign(np.ones(query.lora_kernel_b.shape))
    if quantized:
        model.quantize("int8")
    expected = model(x)
    other = make()
    if quantized:
        other.quantize("int8")
    model.save_weights(tmp_path / "m.weights.h5")
    other.load_weights(tmp_path / "m.weights.h5")
    assert_close(other(x), expected, 2e-2 if quantized else 1e-5)
    elsewhere = keras_rfattn.replace_attention(
        keras_rfattn.restore_attention(make()), "favor", num_features=8
    )
    if quantized:
        elsewhere.quantize("int8")
    with pytest.warns(UserWarning, match="another mechanism"):
        elsewhere.load_weights(tmp_path / "m.weights.h5", skip_mismatch=True)
    with pytest.raises(ValueError, match="The layer computes nothing"):
        elsewhere(x)

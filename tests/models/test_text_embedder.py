"""KerasHub's `TextEmbedder` tasks: pooling, saving and maps of linear backbones."""

import keras
import keras_hub
import numpy as np
import pytest

import keras_rfattn
from tests.marks import ONE_BACKEND
from tests.models import families

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "far"]
TEXTS = ["the cat sat", "far the cat sat the cat sat far"]
EMBEDDERS = {
    "bert": keras_hub.models.BertTextEmbedder,
    "xlm_roberta": keras_hub.models.XLMRobertaTextEmbedder,
    "qwen3": keras_hub.models.Qwen3TextEmbedder,
}
ALL = ["bert", *(pytest.param(x, marks=ONE_BACKEND) for x in ("xlm_roberta", "qwen3"))]


def build(name, **options):
    """Returns an embedder and inputs whose second row is padded."""
    model, inputs = families.build(name)
    backbone = getattr(model, "backbone", model)
    embedder = EMBEDDERS[name](backbone, **options)
    return embedder, {x.name: inputs[x.name] for x in embedder.inputs}


def linear(model):
    keras_rfattn.replace_attention(model, "hedgehog", seed=0)
    return model


def embed(model, inputs):
    return keras.ops.convert_to_numpy(model(inputs, training=False))


@pytest.mark.parametrize("name", ALL)
def test_padding_does_not_change_an_embedding(name):
    embedder, inputs = build(name)
    softmax = embed(embedder, inputs)
    linear(embedder)
    found = embed(embedder, inputs)
    assert np.abs(found - softmax).max() > 1e-4
    np.testing.assert_allclose(np.linalg.norm(found, axis=-1), 1, rtol=1e-5)

    hidden = inputs["padding_mask"] == 0
    assert hidden.any()
    changed = {**inputs, "token_ids": np.where(hidden, 7, inputs["token_ids"])}
    np.testing.assert_array_equal(embed(embedder, changed), found)


@pytest.mark.parametrize("name", ALL)
def test_presets_keep_attention_and_pooling(name, tmp_path):
    pooling = {} if name == "qwen3" else {"pooling_mode": "max", "normalize": False}
    embedder, inputs = build(name, **pooling)
    expected = embed(linear(embedder), inputs)
    embedder.save_to_preset(tmp_path / "embedder")

    loaded = keras_hub.models.TextEmbedder.from_preset(str(tmp_path / "embedder"))
    assert isinstance(loaded, EMBEDDERS[name])
    count = len(keras_rfattn.describe_attention(embedder).replaced)
    assert len(keras_rfattn.describe_attention(loaded).replaced) == count > 0
    for option, value in pooling.items():
        assert getattr(loaded, option) == value
    np.testing.assert_array_equal(embed(loaded, inputs), expected)


@pytest.mark.parametrize("name", ALL)
def test_maps_go_from_an_embedder_to_a_backbone(name, tmp_path):
    embedder, inputs = build(name)
    expected = embed(linear(embedder), inputs)
    keras_rfattn.save_maps(embedder, tmp_path / "maps")

    other, _ = build(name)
    keras_rfattn.load_maps(other.backbone, tmp_path / "maps")
    np.testing.assert_array_equal(embed(other, inputs), expected)


def texts_embedder():
    """Returns a BERT embedder that takes texts."""
    tokenizer = keras_hub.models.BertTokenizer(vocabulary=WORDS)
    preprocessor = keras_hub.models.BertTextEmbedderPreprocessor(
        tokenizer, sequence_length=12
    )
    backbone = families.build("bert")[0].backbone
    return keras_hub.models.BertTextEmbedder(backbone, preprocessor)


def test_an_embedder_of_texts_is_uptrained_and_saved(tmp_path):
    embedder = linear(texts_embedder())
    keras_rfattn.uptrain(embedder, TEXTS * 4, steps=2, batch_size=2, verbose=0)
    expected = np.asarray(embedder.encode_documents(TEXTS))
    embedder.save_to_preset(tmp_path / "embedder")
    loaded = keras_hub.models.TextEmbedder.from_preset(str(tmp_path / "embedder"))
    found = np.asarray(loaded.encode_documents(TEXTS))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_a_longer_embedder_keeps_its_pooling():
    embedder, inputs = build("bert", pooling_mode="cls")
    expected = embed(linear(embedder), inputs)
    longest = embedder.backbone.max_sequence_length
    longer = keras_rfattn.extend_positions(embedder, 2 * longest)
    assert longer.pooling_mode == "cls"
    np.testing.assert_array_equal(embed(longer, inputs), expected)
    wide = {
        x: np.tile(inputs[x], (1, 2 * longest // inputs[x].shape[1])) for x in inputs
    }
    assert embed(longer, wide).shape == expected.shape

"""More tokens than positions: what is said, and models that are made longer."""

import keras
import keras_hub
import numpy as np
import pytest

import keras_rfattn
from keras_rfattn.models.positions import token_limit
from tests.models import families

SIZES = dict(
    vocabulary_size=20,
    num_layers=1,
    num_heads=2,
    hidden_dim=8,
    intermediate_dim=8,
    max_sequence_length=6,
    dropout=0.0,
)
TOO_LONG = (
    r"(?s)`token_ids` must have at most 6 tokens.*`max_sequence_length`.*Received: 9 "
    r"tokens.*`keras_rfattn.extend_positions\(model, 9\)`"
)


def tokens(length):
    ids = np.random.default_rng(0).integers(1, 20, (2, length)).astype("int32")
    return {"token_ids": ids, "segment_ids": 0 * ids, "padding_mask": np.ones_like(ids)}


def classifier():
    """A user's functional model around a backbone with linear attention."""
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.BertBackbone(**SIZES)
    inputs = {
        name: keras.Input((None,), dtype="int32", name=name) for name in tokens(1)
    }
    hidden = backbone(inputs)["sequence_output"]
    pool = keras.layers.GlobalAveragePooling1D()
    model = keras.Model(inputs, keras.layers.Dense(3)(pool(hidden)))
    keras_rfattn.replace_attention(model, "favorplus", num_features=4, seed=0)
    return model


def test_a_backbone_and_a_model_around_it_name_the_way_out():
    model = classifier()
    backbone = next(x for x in model.layers if hasattr(x, "token_embedding"))
    expected = keras.ops.convert_to_numpy(model(tokens(6)))
    assert np.abs(expected).max() > 1e-3
    for call in (
        lambda: backbone(tokens(9)),
        lambda: backbone.predict(tokens(9), verbose=0),
        lambda: model(tokens(9)),
    ):
        with pytest.raises(ValueError, match=TOO_LONG):
            call()
    # A failed call leaves no trace, and fitting calls are as they were.
    found = keras.ops.convert_to_numpy(model(tokens(6)))
    np.testing.assert_array_equal(found, expected)
    symbolic = {k: keras.Input((None,), dtype="int32") for k in tokens(1)}
    assert backbone(symbolic)["sequence_output"].shape == (None, None, 8)


def test_other_errors_are_not_hidden():
    model = classifier()
    with pytest.raises(Exception, match="token_ids|segment_ids|inputs|structure") as e:
        model({"token_ids": tokens(6)["token_ids"]})
    assert "extend_positions" not in str(e.value)


def test_a_task_refuses_in_fit_predict_and_generate():
    backbone = keras_hub.models.GPT2Backbone(**SIZES)
    model = keras_hub.models.GPT2CausalLM(backbone)
    keras_rfattn.replace_attention(model, "favorplus", num_features=4, seed=0)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    before = [keras.ops.convert_to_numpy(x) for x in model.weights]
    long = {k: x for k, x in tokens(9).items() if k != "segment_ids"}
    for call in (
        lambda: model(long),
        lambda: model.predict(long, verbose=0),
        lambda: model.fit(long, long["token_ids"], verbose=0),
        lambda: model.fit(x=long, y=long["token_ids"], verbose=0),
        lambda: model.evaluate(long, long["token_ids"], verbose=0),
        lambda: model.generate(long, stop_token_ids=None),
    ):
        with pytest.raises(ValueError, match=TOO_LONG):
            call()
    # On JAX, Keras' `fit` takes a model's weights away while it runs.
    for a, b in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(a), b)


LIMITS = {"bert": 12, "roberta": 12, "opt": 12, "gpt2": 12, "albert": 12, "llama": None}


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize("family", LIMITS)
def test_the_limit_of_each_family(family):
    model, _ = families.build(family)
    assert token_limit(model) == LIMITS[family]


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_inputs_that_fit_are_never_refused(family):
    model, inputs = families.build(family)
    if isinstance(inputs, dict):
        for name, x in inputs.items():
            limit = token_limit(model, name) if name.endswith("token_ids") else None
            assert limit is None or x.shape[1] <= limit


def test_the_copy_and_the_model_are_apart():
    model = keras_hub.models.BertBackbone(**SIZES)
    keras_rfattn.replace_attention(model, "favorplus", num_features=4, seed=0)
    expected = outputs(model, 6)
    longer = keras_rfattn.extend_positions(model, np.int64(15))
    assert type(longer) is type(model)
    assert len(keras_rfattn.describe_attention(longer).replaced) == 1
    assert outputs(longer, 15).shape == (2, 15, 8)
    np.testing.assert_allclose(outputs(longer, 6), expected, rtol=1e-4, atol=1e-5)
    for weight in longer.trainable_weights:
        weight.assign(weight + 1)
    np.testing.assert_array_equal(outputs(model, 6), expected)
    assert np.abs(expected).max() > 1e-2


def outputs(backbone, length):
    return keras.ops.convert_to_numpy(backbone(tokens(length))["sequence_output"])


def test_what_is_frozen_stays_frozen():
    model = text_task("classifier")
    keras_rfattn.replace_attention(model, "hedgehog", seed=0)
    model.backbone.token_embedding.trainable = False
    model.backbone.transformer_layers[0].trainable = False
    model.layers[-1].kernel.trainable = False
    longer = keras_rfattn.extend_positions(model, 15)
    assert not longer.backbone.transformer_layers[0].trainable
    flags = [[v.trainable for v in x.variables] for x in (model, longer)]
    assert flags[0] == flags[1]
    kept = [len(x.trainable_weights) for x in (model, longer)]
    assert kept[0] == kept[1] > 0


def text_task(name):
    """Returns a task that takes texts of up to six tokens."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    if name == "causal_lm":
        words = ["<|endoftext|>", "a", "b", "c", "\u0120", "ab"]
        tokenizer = keras_hub.models.GPT2Tokenizer(
            {word: i for i, word in enumerate(words)}, merges=["a b"]
        )
        preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, 6)
        backbone = keras_hub.models.GPT2Backbone(**SIZES)
        return keras_hub.models.GPT2CausalLM(backbone, preprocessor)
    tokenizer = keras_hub.models.BertTokenizer([*special, "a", "b", "c"])
    backbone = keras_hub.models.BertBackbone(**SIZES)
    if name == "embedder":
        preprocessor = keras_hub.models.BertTextEmbedderPreprocessor(tokenizer, 6)
        return keras_hub.models.BertTextEmbedder(backbone, preprocessor)
    preprocessor = keras_hub.models.BertTextClassifierPreprocessor(tokenizer, 6)
    return keras_hub.models.BertTextClassifier(backbone, 2, preprocessor)


@pytest.mark.parametrize("name", ["embedder", "classifier", "causal_lm"])
def test_a_task_from_a_preset_reads_longer_texts(name, tmp_path):
    keras.utils.set_random_seed(0)
    text_task(name).save_to_preset(tmp_path / "task")
    base = getattr(keras_hub.models, type(text_task(name)).__bases__[0].__name__)
    model = base.from_preset(str(tmp_path / "task"))
    keras_rfattn.replace_attention(model, "favorplus", num_features=4, seed=0)
    short, long = "a c b", "a c b a c b a c b c c"
    expected = model.predict([short], verbose=0)  # also builds the preprocessor
    longer = keras_rfattn.extend_positions(model, 15)
    assert longer.preprocessor.sequence_length == 15
    assert model.preprocessor.sequence_length == 6
    assert longer.preprocessor.tokenizer is not model.preprocessor.tokenizer
    # A text classifier of BERT sees the same tokens and more padding.
    found = longer.predict([short], verbose=0)
    count = expected.shape[1]
    np.testing.assert_allclose(found[:, :count], expected, rtol=1e-5, atol=1e-6)
    assert np.abs(expected).max() > 1e-3
    tokens, *_ = keras.utils.unpack_x_y_sample_weight(longer.preprocessor([long]))
    assert keras.ops.convert_to_numpy(tokens["padding_mask"]).sum() > 6
    assert longer.predict([long], verbose=0).shape[0] == 1


def test_a_task_of_images_resizes_to_its_new_size():
    converter = keras_hub.layers.ViTImageConverter(image_size=(16, 16), scale=0.1)
    model, _ = families.build("vit")
    model.preprocessor = keras_hub.models.ViTImageClassifierPreprocessor(converter)
    image = np.random.default_rng(0).uniform(size=(1, 16, 16, 3)).astype("float32")
    assert model.predict(image, verbose=0).shape == (1, 3)
    larger = keras_rfattn.extend_positions(model, (16, 32))
    assert tuple(larger.preprocessor.image_size) == (16, 32)
    assert tuple(model.preprocessor.image_size) == (16, 16)
    assert larger.predict(image, verbose=0).shape == (1, 3)


@pytest.mark.full
@pytest.mark.once
def test_the_same_length_gives_a_copy():
    model = keras_hub.models.BertBackbone(**SIZES)
    expected = model(tokens(6))["sequence_output"]
    copy = keras_rfattn.extend_positions(model, 6)
    found = copy(tokens(6))["sequence_output"]
    assert copy is not model
    np.testing.assert_array_equal(*map(keras.ops.convert_to_numpy, (found, expected)))


def test_what_cannot_be_made_longer_names_the_way_out():
    way_out = r"extend_positions\(backbone, ...\)`.*around the result"

    class Mine(keras.Model):
        def __init__(self, backbone):
            super().__init__()
            self.backbone = backbone

        def call(self, x):
            return self.backbone(x)["pooled_output"]

    backbone = keras_hub.models.BertBackbone(**SIZES)
    mine = Mine(backbone)
    mine(tokens(6))
    with pytest.raises(NotImplementedError, match="get_config"):
        keras_rfattn.extend_positions(mine, 15)
    backbone.enable_lora(2)
    with pytest.raises(ValueError, match=f"LoRA or quantization.*{way_out}"):
        keras_rfattn.extend_positions(backbone, 15)
    with pytest.raises(ValueError, match=f"no `max_sequence_length`.*{way_out}"):
        keras_rfattn.extend_positions(classifier(), 15)
    convolutions = keras_hub.models.VGGBackbone([1], [4])
    with pytest.raises(ValueError, match=f"inputs of any size.*{way_out}"):
        keras_rfattn.extend_positions(convolutions, (16, 32))
    plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    with pytest.raises(ValueError, match="no `max_sequence_length`"):
        keras_rfattn.extend_positions(plain, 15)
    for wrong in (8.0, "15", (15, 15), None, True, 5):
        with pytest.raises(ValueError, match="`max_length` must be an integer of at"):
            keras_rfattn.extend_positions(text_task("classifier"), wrong)
    for wrong in ("bert_base_en", None, keras_hub.models.BertBackbone):
        with pytest.raises(TypeError, match="`model` must be a Keras model or layer"):
            keras_rfattn.extend_positions(wrong, 15)

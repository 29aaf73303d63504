"""Tasks of images: BLIP-2 generates with states, PARSeq as KerasHub has it."""

import keras
import numpy as np
import pytest

import keras_rfattn
from keras_rfattn.models.generation import Cache
from tests.marks import ONE_BACKEND
from tests.models.families import QUERIES_AND_KEYS

keras_hub = pytest.importorskip("keras_hub")
LENGTH, IMAGE = 8, 3


def blip2(images=IMAGE):
    keras.utils.set_random_seed(0)
    models, seen = keras_hub.models, {}
    language_model = models.BLIP2CustomOPT(
        vocabulary_size=40, num_layers=2, num_heads=2, hidden_dim=12, dropout=0.0,
        intermediate_dim=16, num_query_tokens=images, qformer_hidden_dim=8,
        max_sequence_length=30,
    )  # fmt: skip
    if images:
        seen["vision_encoder"] = models.BLIP2VisionEncoder(
            image_size=8, patch_size=4, num_layers=1, num_heads=2, hidden_dim=8,
            intermediate_dim=8, use_patch_bias=True, use_class_token=True,
            use_mha_bias=True, use_mlp_bias=True, dropout_rate=0.0,
            layer_norm_epsilon=1e-5, initializer_range=0.02,
        )  # fmt: skip
        seen["qformer"] = models.BLIP2QFormer(
            num_query_tokens=images, num_layers=1, num_heads=2, hidden_dim=8,
            intermediate_dim=8, vision_dim=8, cross_attention_frequency=1, dropout=0.0,
            layer_norm_epsilon=1e-5,
        )  # fmt: skip
    backbone = models.BLIP2Backbone(
        **{"vision_encoder": None, "qformer": None, **seen},
        language_model=language_model,
    )
    generator = np.random.default_rng(3)
    for weight in backbone.trainable_weights:
        if weight.path.endswith((*QUERIES_AND_KEYS, "embeddings", "projection/kernel")):
            weight.assign(generator.normal(size=weight.shape))
    return models.BLIP2CausalLM(backbone=backbone, preprocessor=None)


def prompts(images=IMAGE):
    """Prompts of 3, 5 and 1 tokens, the second with a hole."""
    generator, last = np.random.default_rng(0), np.array([2, 4, 0])[:, None]
    padding = np.arange(LENGTH) <= last
    padding[1, 2] = False
    x = {
        "token_ids": generator.integers(2, 40, (3, LENGTH)).astype("int32"),
        "padding_mask": padding.astype("int32"),
    }
    if images:
        pixels = generator.normal(size=(3, 8, 8, 3))
        x["images"] = pixels.astype("float32")
    return x


def logits(model, x):
    return keras.ops.convert_to_numpy(model(x, training=False))


@pytest.mark.once
@pytest.mark.full
@pytest.mark.parametrize(
    ("images", "arguments"),
    [
        (IMAGE, {"exclude": "*q_former*"}),
        pytest.param(0, {"window": 2}, marks=ONE_BACKEND),
        # Keys and values of a layer that stays softmax.
        pytest.param(
            IMAGE,
            {"exclude": ["*q_former*", "*transformer_layer_1/*"], "window": 2},
            marks=ONE_BACKEND,
        ),
    ],
)
def test_generation_is_by_full_passes(images, arguments):
    model, x = blip2(images), prompts(images)
    keras_rfattn.replace_attention(
        model, "favorpp", num_features=16, seed=0, **arguments
    )
    given = {k: keras.ops.convert_to_tensor(v) for k, v in x.items()}
    _, cache = model._build_cache(
        given["token_ids"],
        model._encode_images(given["images"]) if images else None,
        given["padding_mask"],
    )
    assert isinstance(cache, Cache)
    model.compile(sampler="greedy")
    found = model.generate({k: v.copy() for k, v in x.items()}, stop_token_ids=None)
    last = np.where(x["padding_mask"] > 0, np.arange(LENGTH), 0).max(1)
    for i in range(last.min() + 1, LENGTH):
        best, written = logits(model, x)[:, i - 1].argmax(-1), i > last
        x["token_ids"][written, i], x["padding_mask"][written, i] = best[written], 1
    kept = x["padding_mask"] > 0
    assert len(np.unique(x["token_ids"][kept])) > 5
    np.testing.assert_array_equal(
        np.asarray(found["token_ids"])[kept], x["token_ids"][kept]
    )


def test_images_are_asked_for():
    model = keras_rfattn.replace_attention(blip2(), "favorpp", exclude="*q_former*")
    x = prompts(images=0)
    with pytest.raises(ValueError, match="take 3 positions before.*no images"):
        model.generate_step({k: keras.ops.convert_to_tensor(v) for k, v in x.items()})


@pytest.mark.full
@pytest.mark.once
def test_a_task_whose_decoder_stays_softmax_generates():
    keras.utils.set_random_seed(0)
    models = keras_hub.models
    encoder = models.ViTBackbone(
        image_shape=(8, 8, 3), patch_size=(4, 4), num_layers=1, num_heads=2,
        hidden_dim=8, mlp_dim=8, use_class_token=False,
    )  # fmt: skip
    backbone = models.PARSeqBackbone(
        vocabulary_size=97, max_label_length=6, image_encoder=encoder,
        num_decoder_heads=2, num_decoder_layers=1, decoder_hidden_dim=8,
        decoder_mlp_dim=8,
    )  # fmt: skip
    preprocessor = models.PARSeqCausalLMPreprocessor(
        image_converter=keras_hub.layers.PARSeqImageConverter(image_size=(8, 8)),
        tokenizer=models.PARSeqTokenizer(),
    )
    model = models.PARSeqCausalLM(backbone=backbone, preprocessor=preprocessor)
    x = {
        "images": keras.ops.ones((2, 8, 8, 3)),
        "token_ids": keras.ops.ones((2, 6), "int32"),
        "padding_mask": keras.ops.arange(6)[None] < keras.ops.array([[1], [3]]),
    }
    keras_rfattn.replace_attention(model, "favorpp", exclude="*decoder*")
    found = model.generate_step(x)["token_ids"]
    assert found.shape == (2, 6)

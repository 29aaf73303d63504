"""PaliGemma: image and prompt see each other, what is generated comes after them."""

import keras
import numpy as np
import pytest

import keras_rfattn
from keras_rfattn.layers.attention import Attention
from keras_rfattn.layers.recording import recording
from tests import helpers as h
from tests.marks import ONE_BACKEND
from tests.models.families import QUERIES_AND_KEYS

keras_hub = pytest.importorskip("keras_hub")

LENGTH = 9


def paligemma():
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.PaliGemmaBackbone(
        vocabulary_size=40, image_size=8, num_layers=2, num_query_heads=4,
        num_key_value_heads=2, hidden_dim=16, intermediate_dim=24, head_dim=6,
        vit_patch_size=4, vit_num_layers=1, vit_num_heads=2, vit_hidden_dim=8,
        vit_intermediate_dim=16,
    )  # fmt: skip
    generator = np.random.default_rng(3)
    for weight in backbone.trainable_weights:
        if weight.path.endswith(QUERIES_AND_KEYS):
            weight.assign(1.2 * generator.normal(size=weight.shape))
    return keras_hub.models.PaliGemmaCausalLM(backbone=backbone, preprocessor=None)


def inputs(prompts=(4, 6, 1), responses=(3, 0, 8)):
    """Rows of prompts and responses; the second prompt has a hole."""
    generator, positions = np.random.default_rng(0), np.arange(LENGTH)
    start, end = np.array(prompts)[:, None], np.add(prompts, responses)[:, None]
    padding = positions < end
    padding[1, 2] = False
    return {
        "token_ids": generator.integers(2, 40, (3, LENGTH)).astype("int32"),
        "images": generator.uniform(size=(3, 8, 8, 3)).astype("float32"),
        "padding_mask": padding.astype("int32"),
        "response_mask": (padding & (positions >= start)).astype("int32"),
    }


def logits(model, x):
    return keras.ops.convert_to_numpy(model(x, training=False))


def replace(model, feature_map="favorpp", **arguments):
    return keras_rfattn.replace_attention(model, feature_map, seed=0, **arguments)


@pytest.mark.full
@pytest.mark.once
def test_the_mask_is_kept():
    model, x = paligemma(), inputs()
    expected = logits(model, x)
    replace(model, num_features=8)
    linear = logits(model, x)
    rows = keras_rfattn.describe_attention(model).replaced
    assert [row.causal for row in rows] == [False, True, True]
    layers = [x for x in model._flatten_layers() if getattr(x, "feature_map", None)]
    with recording([(layer, Attention.softmax) for layer in layers]):
        found = logits(model, x)
    real = x["padding_mask"] > 0
    np.testing.assert_allclose(found[real], expected[real], rtol=0, atol=5e-5)
    assert np.abs(linear - expected)[real].max() > 1e-2
    keras_rfattn.restore_attention(model)
    np.testing.assert_array_equal(logits(model, x), expected)


@pytest.mark.full
@pytest.mark.once
def test_who_sees_whom():
    model, x = replace(paligemma(), num_features=8), inputs()
    before = logits(model, x)

    def moved(row, column):
        other = {k: v.copy() for k, v in x.items()}
        other["token_ids"][row, column] = 1 + other["token_ids"][row, column] % 38
        return (np.abs(logits(model, other) - before) > 0).any(-1)

    # The first row: a prompt of 4, a response of 3, padding.
    assert moved(0, 3)[0, :7].all()
    assert moved(0, 5)[0].tolist()[:7] == [False] * 5 + [True] * 2
    assert not moved(0, 8)[0, :7].any()
    assert not moved(1, 2)[1, [0, 1, 3, 4, 5]].any()


@pytest.mark.parametrize(
    ("feature_map", "arguments"),
    [
        ("favorpp", {"num_features": 16}),
        ("polynomial", {}),
        pytest.param("favorplus", {"exclude": "*_0/*"}, marks=ONE_BACKEND),
        pytest.param("polysketch", {}, marks=ONE_BACKEND),
    ],
)
@pytest.mark.parametrize("prompts", [(4, 6, 1), (2, 6, 4)])
def test_generation_is_by_full_passes(feature_map, arguments, prompts):
    model = paligemma()
    if "exclude" in arguments:
        paths = [r.path for r in keras_rfattn.describe_attention(model).kept]
        arguments = {"exclude": [x for x in paths if "attention" in x][:1]}
    replace(model, feature_map, **arguments)
    x = inputs(prompts, responses=(0, 0, 0))
    model.compile(sampler="greedy")
    prompt = {k: v for k, v in x.items() if k != "response_mask"}
    found = model.generate(
        {k: v.copy() for k, v in prompt.items()}, stop_token_ids=None
    )
    last = np.where(x["padding_mask"] > 0, np.arange(LENGTH), 0).max(1)
    full_pass = h.forward(model)
    for i in range(last.min() + 1, LENGTH):
        best, written = h.to_numpy(full_pass(x))[:, i - 1].argmax(-1), i > last
        x["token_ids"][written, i] = best[written]
        x["padding_mask"][written, i] = x["response_mask"][written, i] = 1
    kept = x["padding_mask"] > 0
    np.testing.assert_array_equal(
        np.asarray(found["token_ids"])[kept], x["token_ids"][kept]
    )


def test_a_task_made_around_a_linear_backbone_must_be_registered():
    model = replace(paligemma(), num_features=16)
    late = keras_hub.models.PaliGemmaCausalLM(
        backbone=model.backbone, preprocessor=None
    )
    prompt = {k: x for k, x in inputs().items() if k != "response_mask"}
    found = []
    for task in (model, late):
        task.compile(sampler="greedy")
        if task is late:
            with pytest.raises(ValueError, match=r"Call `keras_rfattn.register\(task"):
                task.generate(dict(prompt), stop_token_ids=None)
            keras_rfattn.register(task)
        output = task.generate(dict(prompt), stop_token_ids=None)
        found.append(np.asarray(output["token_ids"]))
    np.testing.assert_array_equal(*found)


def test_windows_and_streams_are_refused():
    model = paligemma()
    with pytest.raises(ValueError, match=r"\(prefix-LM\) has no windows.*window=4"):
        replace(model, window=4)
    replace(model)
    with pytest.raises(TypeError, match="whose only inputs are tokens"):
        keras_rfattn.generation.prefill(model, np.ones((1, 2), "int32"))


@pytest.mark.full
@pytest.mark.once
def test_it_trains_and_is_saved(tmp_path):
    model, x = replace(paligemma(), "hedgehog"), inputs()
    report = keras_rfattn.uptrain(
        model, {k: np.concatenate([v] * 2) for k, v in x.items()}, steps=8,
        batch_size=3, verbose=0, seed=0,
    )  # fmt: skip
    assert report.after < report.before
    model.backbone.save_to_preset(tmp_path)
    loaded = keras_hub.models.Backbone.from_preset(str(tmp_path))
    expected = keras.ops.convert_to_numpy(model.backbone(x))
    found = keras.ops.convert_to_numpy(loaded(x))
    np.testing.assert_array_equal(found, expected)

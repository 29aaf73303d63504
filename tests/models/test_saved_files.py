"""Files that were changed, and models that Keras rebuilds in its own ways."""

import copy
import json
import pickle
import shutil
import subprocess
import sys
import zipfile

import h5py
import keras
import numpy as np
import pytest

import keras_rfattn
from tests.environment import environment
from tests.marks import first

X = np.random.default_rng(0).normal(size=(2, 6, 8)).astype("float32")


@keras.saving.register_keras_serializable("test_saved_files")
class OwnAttention(keras.layers.MultiHeadAttention):
    """Of a class that no import finds once it is linear."""


@keras.saving.register_keras_serializable("test_saved_files")
class WithoutBuild(keras.Model):
    """Keras builds it by running it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = OwnAttention(2, 4)
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(self.attention(x, x))


@keras.saving.register_keras_serializable("test_saved_files")
class Nested(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = WithoutBuild()

    def call(self, x, scale=None):
        return self.inner(x) if scale is None else self.inner(x * scale)


def functional():
    inputs = keras.Input((6, 8))
    x = keras.layers.MultiHeadAttention(2, 4, name="first")(inputs, inputs)
    return keras.Model(inputs, keras.layers.Dense(3)(x))


def make(kind, feature_map="favorplus", **options):
    keras.utils.set_random_seed(1)
    model = {"functional": functional, "own": WithoutBuild, "nested": Nested}[kind]()
    model(X)
    options = {"seed": 3, **options}
    return keras_rfattn.replace_attention(model, feature_map, **options)


def output(model):
    return keras.ops.convert_to_numpy(model(X))


def mechanisms(model):
    return [r.mechanism for r in keras_rfattn.describe_attention(model).replaced]


KINDS = ["functional", "own", "nested"]


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_build_comes_back(kind, tmp_path):
    model = make(kind, num_features=8)
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(output(loaded), output(model))
    assert mechanisms(loaded) == ["favorplus"]


@pytest.mark.smoke
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "way", [lambda m: pickle.loads(pickle.dumps(m)), copy.deepcopy]
)
def test_pickle_and_deepcopy(kind, way):
    model = make(kind, num_features=8)
    again = way(model)
    np.testing.assert_array_equal(output(again), output(model))
    assert mechanisms(again) == ["favorplus"]
    layers = [x for x in model._flatten_layers() if hasattr(x, "feature_map")]
    (layer,) = layers
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(way(layer)(X, X)),
        keras.ops.convert_to_numpy(layer(X, X)),
    )


def hub_model():
    keras_hub = pytest.importorskip("keras_hub")
    model = keras_hub.models.BertBackbone(30, 1, 2, 8, 16, max_sequence_length=12)
    return keras_rfattn.replace_attention(model, "favorplus", num_features=8, seed=0)


def run(script, **options):
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True,
        text=True, check=False, **options,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.once
def test_one_import_loads_and_unpickles(tmp_path):
    model = hub_model()
    model.save(tmp_path / "m.keras")
    (tmp_path / "m.pickle").write_bytes(pickle.dumps(model))
    code, text = run(LOADS, cwd=tmp_path)
    assert code == 0 and "without: 'module': 'keras_rfattn." in text, text
    assert "with: favorplus" in text, text
    code, text = run(UNPICKLES, cwd=tmp_path)
    assert code == 0 and "without: keras_hub, which is not installed" in text, text
    assert "with: favorplus" in text, text


# What fails comes first: there is nothing that it could bring along.
LOADS = """
import keras, re
try:
    keras.saving.load_model("m.keras")
except Exception as error:
    print("without:", *re.findall("'module': 'keras_rfattn[.]", str(error)))
import keras_rfattn
model = keras.saving.load_model("m.keras")
print("with:", keras_rfattn.describe_attention(model).replaced[0].mechanism)
"""
UNPICKLES = """
import pickle, re, keras_rfattn
import importlib.util as util
find, util.find_spec = util.find_spec, (
    lambda name, *a: None if name == "keras_hub" else find(name, *a)
)
import keras
try:
    keras.saving.load_model("m.keras")
except Exception as error:
    print("without:", *re.findall("keras_hub, which is not installed", str(error)))
util.find_spec = find
with open("m.pickle", "rb") as file:
    model = pickle.load(file)
print("with:", keras_rfattn.describe_attention(model).replaced[0].mechanism)
"""


def rewrite(path, target, change_config=None, change_weights=None):
    """A copy of a `.keras` file with its parts changed."""
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(target, "w") as copied:
        for name in source.namelist():
            data = source.read(name)
            if name == "config.json" and change_config:
                config = json.loads(data)
                change_config(config)
                data = json.dumps(config).encode()
            if name.endswith(".h5") and change_weights:
                file = target.with_suffix(".h5")
                file.write_bytes(data)
                with h5py.File(file, "a") as weights:
                    change_weights(weights)
                data = file.read_bytes()
            copied.writestr(name, data)
    return target


def groups(weights, ending):
    found = []
    weights.visit(lambda name: found.append(name) if name.endswith(ending) else None)
    assert found
    return found


def drop(ending):
    def change(weights):
        for name in groups(weights, ending):
            del weights[name]

    return change


def found_in(config, key):
    """Every dict of a config that has `key`."""
    if isinstance(config, dict):
        yield from [config] if key in config else []
        config = list(config.values())
    if isinstance(config, list):
        for item in config:
            yield from found_in(item, key)


def put(key, value):
    def change(config):
        holders = list(found_in(config, key))
        assert holders
        for holder in holders:
            holder[key] = value

    return change


def another_class(config):
    (holder,) = found_in(config, "feature_map")
    holder["feature_map"] = {
        "module": "keras.layers", "class_name": "Dense", "registered_name": None,
        "config": {"units": 2},
    }  # fmt: skip


DAMAGED = {
    "no fingerprint": dict(change_weights=drop("attention_fingerprint")),
    "no vectors": dict(change_weights=drop("feature_map/vars/0")),
    "no map": dict(change_weights=drop("feature_map/vars")),
    "window": dict(change_config=put("window", 3)),
    "no window": dict(change_config=put("window", None)),
    "sliding": dict(change_config=put("sliding", True)),
    "projection": dict(change_config=put("norms", "sqrt_dim")),
    "another class": dict(change_config=another_class),
}


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("kind", ["functional", "own"])
def test_damaged_files_are_refused(kind, damage, tmp_path):
    model = make(kind, num_features=8, window=4)
    model.save(tmp_path / "m.keras")
    path = rewrite(tmp_path / "m.keras", tmp_path / "damaged.keras", **DAMAGED[damage])
    with pytest.raises((ValueError, TypeError)):
        keras.saving.load_model(path)
    same = rewrite(tmp_path / "m.keras", tmp_path / "same.keras")
    np.testing.assert_array_equal(output(keras.saving.load_model(same)), output(model))


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize(
    "change", [put("layers", None), put("attention", [1]), put("format", 99)]
)
def test_damaged_entries_are_named(change, tmp_path):
    make("own", num_features=8).save(tmp_path / "m.keras")
    path = rewrite(tmp_path / "m.keras", tmp_path / "d.keras", change_config=change)
    with pytest.raises(ValueError, match="(?s)'attention'.*Received.*[Ss]ave"):
        keras.saving.load_model(path)


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize("part", ["attention_fingerprint", "feature_map/vars"])
def test_damaged_weights_are_refused(part, tmp_path):
    model = make("functional", num_features=8)
    path = tmp_path / "m.weights.h5"
    model.save_weights(path)
    shutil.copy(path, tmp_path / "damaged.weights.h5")
    with h5py.File(tmp_path / "damaged.weights.h5", "a") as weights:
        drop(part)(weights)
    other = make("functional", num_features=8, seed=9)
    with pytest.raises(ValueError, match="put together|fingerprint"):
        other.load_weights(tmp_path / "damaged.weights.h5")
    other.load_weights(path)
    np.testing.assert_array_equal(output(other), output(model))
    windowed = make("functional", num_features=8, window=3)
    with pytest.raises(ValueError, match="another window"):
        windowed.load_weights(path)


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize("name", first(["favorpp", "favorplus", "elu"]))
def test_training_stops_at_nan_as_with_softmax(name):
    x = np.concatenate([X] * 4)
    x[5, 3, 2] = np.nan
    epochs = []
    for replaced in (False, True):
        keras.utils.set_random_seed(0)
        model = functional()
        if replaced:
            keras_rfattn.replace_attention(model, name, seed=0)
        model.compile("adam", "mse")
        history = model.fit(
            x, np.zeros((8, 6, 3)), batch_size=2, epochs=3, shuffle=False, verbose=0,
            callbacks=[keras.callbacks.TerminateOnNaN()],
        )  # fmt: skip
        epochs.append(len(history.epoch))
        assert np.isnan(history.history["loss"][-1])
    assert epochs == [1, 1]


@pytest.mark.full
@pytest.mark.once
def test_quantization_is_silent_about_maps(recwarn):
    model = make("functional", num_features=8)
    model.quantize("int8")
    assert not [w for w in recwarn if "FavorPlus" in str(w.message)]
    assert np.all(np.isfinite(output(model)))


BATCHES = {
    "strings": ["a text", "another"],
    "array of strings": np.array(["a text", "another"]),
    "dict": {"token_ids": np.zeros((2, 6), "int32")},
    "wrong shape": np.zeros((2, 5), "float32"),
}


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize("name", BATCHES)
def test_what_a_batch_must_be(name):
    model = make("functional", "favorpp", num_features=8)
    with pytest.raises(ValueError, match=r"(?s)must be an input of the model"):
        keras_rfattn.calibrate(model, [BATCHES[name]], verbose=0)
    if name != "strings":
        with pytest.raises(ValueError, match=r"\(None, 6, 8\)\]. Received"):
            keras_rfattn.calibrate(model, [BATCHES[name]], verbose=0)


@pytest.mark.full
@pytest.mark.once
def test_bad_calibration(capsys):
    model = make("functional", "favorpp", num_features=8)
    for max_tokens in (0, -3, 2.5, None):
        with pytest.raises(ValueError, match="`max_tokens` must be a positive integer"):
            keras_rfattn.calibrate(model, [X], max_tokens=max_tokens)
    with pytest.raises(ValueError, match="`verbose` must be"):
        keras_rfattn.calibrate(model, [X], verbose="loud")
    capsys.readouterr()
    keras_rfattn.calibrate(model, [X, X], verbose=0)
    assert not capsys.readouterr().out
    keras_rfattn.calibrate(model, (x for x in [X, X]))
    assert "2/" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.once
def test_nothing_but_padding():
    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(5, 8, mask_zero=True)(inputs)
    model = keras.Model(inputs, keras.layers.MultiHeadAttention(2, 4)(x, x))
    keras_rfattn.replace_attention(model, "favorpp", num_features=8)
    with pytest.raises(ValueError, match="with a real token"):
        keras_rfattn.calibrate(model, [np.zeros((2, 6), "int32")], verbose=0)


@pytest.mark.parametrize("way", [copy.deepcopy, keras.models.clone_model])
def test_a_layer_of_a_users_class_in_a_functional_model(way, tmp_path):
    inputs = keras.Input((6, 8))
    model = keras.Model(inputs, OwnAttention(2, 4)(inputs, inputs))
    keras_rfattn.replace_attention(model, "favorplus", num_features=8, seed=3)
    again = way(model)
    again.set_weights(model.get_weights())
    np.testing.assert_array_equal(output(again), output(model))
    assert mechanisms(again) == ["favorplus"]
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(output(loaded), output(model))

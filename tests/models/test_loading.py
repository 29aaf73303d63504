"""A layer with weights of another configuration computes nothing."""

import copy
import pickle

import keras
import numpy as np
import pytest

import keras_rfattn
from tests.helpers import assert_same, to_numpy
from tests.marks import ONE_BACKEND, first

pytestmark = [*ONE_BACKEND]

X = np.random.default_rng(0).normal(size=(2, 6, 8)).astype("float32")


@keras.saving.register_keras_serializable("test_loading")
class Own(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = keras.layers.MultiHeadAttention(2, 4)
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(self.attention(x, x))


def functional():
    inputs = keras.Input((6, 8))
    x = keras.layers.MultiHeadAttention(2, 4, name="attention")(inputs, inputs)
    return keras.Model(inputs, keras.layers.Dense(3, name="dense")(x))


def make(kind, arguments, seed=0):
    keras.utils.set_random_seed(seed)
    model = functional() if kind == "functional" else Own()
    model(X)
    if arguments is not None:
        keras_rfattn.replace_attention(model, seed=seed, **arguments)
    return model


# All but softmax have weights of the same shapes.
SIZE = {"num_features": 8}
CONFIGURATIONS = {
    "softmax": None,
    "favorplus": {"feature_map": "favorplus", **SIZE},
    "favor": {"feature_map": "favor", **SIZE},
    "window": {"feature_map": "favorplus", "window": 3, **SIZE},
    "temperature": {"feature_map": "favorplus", "temperature": 0.5, **SIZE},
    "softmax head": {"feature_map": "favorplus", "softmax_heads": [1], **SIZE},
}
# Without any weight, so that even the number of arrays is that of softmax.
STATELESS = {"softmax": None, "elu": {"feature_map": "elu"}}
PAIRS = [("favorplus", x) for x in CONFIGURATIONS if x != "favorplus"]
CONFIGURATIONS |= STATELESS
PAIRS += [("elu", "softmax"), ("window", "favorplus")]


def save_sharded(model, path):
    model.save_weights(path, max_shard_size=1)


FORMATS = {
    "m.weights.h5": (keras.Model.save_weights, {}),
    "m.weights.json": (save_sharded, {}),
    "m.keras": (keras.Model.save, {}),
}
LOADERS = {
    "strict": lambda m, path: m.load_weights(path),
    "skip": lambda m, path: m.load_weights(path, skip_mismatch=True),
    "function": lambda m, path: keras.saving.load_weights(m, path, skip_mismatch=True),
}
REFUSED = (
    "has the mechanism|saved with another mechanism|expected . variables, but received"
)


def values(model):
    return [to_numpy(w).copy() for w in model.weights]


# Every pair in one format, and one pair in the others.
CASES = [(x, y, "functional", "m.weights.h5") for x, y in PAIRS]
CASES += [("favorplus", "softmax", "own", "m.weights.h5")]
CASES += [("favorplus", "window", "functional", "m.weights.json")]
CASES += [("window", "favor", "functional", "m.keras")]


@pytest.mark.parametrize(("saved", "other", "kind", "name"), first(CASES))
def test_files_of_another_configuration_are_refused(saved, other, kind, name, tmp_path):
    path = str(tmp_path / name)
    FORMATS[name][0](make(kind, CONFIGURATIONS[saved]), path)
    expected = values(make(kind, CONFIGURATIONS[saved]))
    for way, load in LOADERS.items():
        model = make(kind, CONFIGURATIONS[other], seed=1)
        model.predict(X, verbose=0)
        expectation = (
            pytest.raises(ValueError, match=REFUSED)
            if way == "strict"
            else pytest.warns(UserWarning, match=REFUSED)
        )
        with expectation:
            load(model, path)
        if other != "softmax":
            for call in (model, lambda x, m=model: m.predict(x, verbose=0)):
                with pytest.raises(ValueError, match="The layer computes nothing"):
                    call(X)
            keras_rfattn.restore_attention(model)
            keras_rfattn.replace_attention(model, **CONFIGURATIONS[saved])
            assert np.all(np.isfinite(to_numpy(model(X))))
            load(model, path)
            for a, b in zip(values(model), expected, strict=True):
                np.testing.assert_array_equal(a, b)


def test_a_layer_computes_again_with_its_own_weights(tmp_path):
    model = make("functional", CONFIGURATIONS["favorplus"])
    output = to_numpy(model(X))
    model.save_weights(tmp_path / "own.weights.h5")
    other = make("functional", CONFIGURATIONS["window"])
    other.save_weights(tmp_path / "other.weights.h5")
    with pytest.raises(ValueError, match=REFUSED):
        model.load_weights(tmp_path / "other.weights.h5")
    with pytest.raises(ValueError, match="another window.*computes nothing"):
        model(X)
    model.load_weights(tmp_path / "own.weights.h5")
    assert_same(model(X), output)


def test_a_layer_that_a_file_lacks_keeps_its_weights(tmp_path):
    make("functional", None).save_weights(tmp_path / "m.weights.h5")
    inputs = keras.Input((6, 8))
    x = inputs
    for name in ("attention", "more"):
        x = keras.layers.MultiHeadAttention(2, 4, name=name)(x, x)
    model = keras.Model(inputs, x)
    keras_rfattn.replace_attention(model, **CONFIGURATIONS["favorplus"])
    with pytest.warns(UserWarning, match="4 objects could not be loaded"):
        model.load_weights(tmp_path / "m.weights.h5", skip_mismatch=True)
    assert np.all(np.isfinite(to_numpy(model(X))))


@pytest.mark.parametrize("kind", ["functional", "own"])
@pytest.mark.parametrize("skip_mismatch", [False, True])
def test_softmax_files_load_whole(kind, skip_mismatch, tmp_path):
    softmax = make(kind, None)
    softmax.save_weights(tmp_path / "m.weights.h5")
    model = make(kind, CONFIGURATIONS["favorplus"], seed=1)
    model.load_weights(tmp_path / "m.weights.h5", skip_mismatch=skip_mismatch)
    keras_rfattn.restore_attention(model)
    assert_same(model(X), softmax(X))


def test_skip_mismatch_still_skips_a_new_head(tmp_path):
    model = make("functional", CONFIGURATIONS["favorplus"])
    model.save_weights(tmp_path / "m.weights.h5")
    inputs = keras.Input((6, 8))
    x = keras.layers.MultiHeadAttention(2, 4, name="attention")(inputs, inputs)
    other = keras.Model(inputs, keras.layers.Dense(5)(x))
    keras_rfattn.replace_attention(other, **CONFIGURATIONS["favorplus"], seed=9)
    with pytest.warns(UserWarning, match="1 objects could not be loaded"):
        other.load_weights(tmp_path / "m.weights.h5", skip_mismatch=True)
    assert_same(other.layers[1](X, X), model.layers[1](X, X))


WAYS = {
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "deepcopy": copy.deepcopy,
    "clone": keras.models.clone_model,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["functional", "own"])
def test_copies_have_the_same_configuration(kind, way):
    model = make(kind, CONFIGURATIONS["window"])
    again = WAYS[way](model)
    again(X)
    if way == "clone":
        again.set_weights(model.get_weights())
    assert_same(again(X), model(X))
    row, other = (keras_rfattn.describe_attention(x).replaced for x in (again, model))
    assert [x.note for x in row] == [x.note for x in other]

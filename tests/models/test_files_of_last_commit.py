"""Saved files load, and the models compute the same outputs as when they were saved.

`saved/make.py` made them.
"""

import pathlib

import keras
import keras_hub
import numpy as np
import pytest

import keras_rfattn
from tests import helpers as h
from tests.models.saved import make

FOLDER = pathlib.Path(make.__file__).parent
EXPECTED = np.load(FOLDER / "outputs.npz")


def padded():
    return {k: make.segments()[k] for k in ("token_ids", "padding_mask")}


def preset():
    return keras_hub.models.CausalLM.from_preset(str(FOLDER / "gpt2"))


def weights(name, build):
    def load():
        model = build()
        model.load_weights(FOLDER / f"{name}.weights.h5")
        return model

    return load


def archive(name):
    return lambda: keras.saving.load_model(FOLDER / name, compile=False)


# File -> function that loads it, function that returns the inputs.
CASES = {
    "own.keras": (archive("own.keras"), lambda: make.X),
    "bert.keras": (archive("bert.keras"), make.segments),
    "gpt2": (preset, padded),
    "own.weights.h5": (weights("own", make.replaced_own), lambda: make.X),
    "functional.weights.h5": (
        weights("functional", make.replaced_functional),
        lambda: make.X,
    ),
    "functional.h5": (archive("functional.h5"), lambda: make.X),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_outputs_are_the_same(name):
    load, inputs = CASES[name]
    expected = EXPECTED[name.partition(".")[0]]
    actual = make.output(h.forward(load()), inputs())
    # JAX wrote the files.
    rtol = 1e-5 if keras.backend.backend() == "jax" else 1e-4
    assert np.max(np.abs(expected)) > 0.01
    assert np.max(np.abs(actual - expected)) <= rtol * np.max(np.abs(expected))


@pytest.mark.parametrize("name", ["own.weights.h5", "functional.weights.h5"])
def test_another_mechanism_is_refused(name):
    model = make.replaced_own() if "own" in name else make.replaced_functional()
    keras_rfattn.restore_attention(model)
    keras_rfattn.replace_attention(model, "favor", num_features=4, seed=1)
    with pytest.raises(ValueError, match="saved with another mechanism"):
        model.load_weights(FOLDER / name)


@pytest.mark.smoke
def test_every_file_is_read():
    names = {p.name for p in FOLDER.iterdir() if p.suffix in (".keras", ".h5")}
    assert names | {"gpt2"} == set(CASES)
    assert set(EXPECTED) == {name.partition(".")[0] for name in CASES}

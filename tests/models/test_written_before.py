"""Files written before the package was rearranged load, with the same outputs.

`saved/make.py` made them, with the package as it was at commits f99375f and, for the
first format of fingerprints, 055f4d9.
"""

import pathlib

import keras
import keras_hub
import numpy as np
import pytest

from tests.marks import ONE_BACKEND
from tests.models.saved import make

FOLDER = pathlib.Path(make.__file__).parent
EXPECTED = np.load(FOLDER / "outputs.npz")
keras.saving.register_keras_serializable("written_before")(make.Own)


LONG = ("every_map",)


def padded():
    return {k: make.segments()[k] for k in ("token_ids", "padding_mask")}


def preset():
    return keras_hub.models.CausalLM.from_preset(str(FOLDER / "gpt2"))


def weights(name):
    def load():
        model = make.replaced_own()
        model.load_weights(FOLDER / f"{name}.weights.h5")
        return model

    return load


def archive(name):
    return lambda: keras.saving.load_model(FOLDER / f"{name}.keras")


CASES = {
    "every_map": (archive("every_map"), lambda: make.X),
    "own": (archive("own"), lambda: make.X),
    "bert": (archive("bert"), make.segments),
    "transformer_pp": (archive("transformer_pp"), lambda: make.TOKENS),
    "gpt2": (preset, padded),
    "own weights": (weights("own"), lambda: make.X),
    "own_first_format": (weights("own_first_format"), lambda: make.X),
}


@pytest.mark.smoke
@pytest.mark.filterwarnings("ignore:.*not normalized")
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=ONE_BACKEND if n in LONG else ()) for n in CASES],
)
def test_outputs_are_what_they_were(name):
    load, inputs = CASES[name]
    expected = EXPECTED[name.removesuffix(" weights")]
    actual = make.output(load(), inputs())
    # Written on JAX; signed maps amplify another backend's rounding.
    rtol = 1e-6 if keras.backend.backend() == "jax" else 1e-4
    assert np.max(np.abs(expected)) > 0.1
    assert np.max(np.abs(actual - expected)) <= rtol * np.max(np.abs(expected))


@pytest.mark.smoke
def test_every_kind_of_file_is_read():
    names = {p.name for p in FOLDER.iterdir() if p.suffix in (".keras", ".h5")}
    read = {f"{n}.keras" for n in ("every_map", "own", "bert", "transformer_pp")}
    read |= {"own.weights.h5", "own_first_format.weights.h5"}
    assert names == read and set(EXPECTED) == {
        x.removesuffix(" weights") for x in CASES
    }

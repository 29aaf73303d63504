"""The arguments of `uptrain` in one form, and the plan of stages that follows."""

import dataclasses

import keras
import numpy as np
import pytest

from keras_rfattn.layers.recording import linear_layers
from keras_rfattn.uptraining.settings import Settings
from keras_rfattn.uptraining.training import Stage, planned
from tests.uptraining import models as m

pytestmark = pytest.mark.once


def settings(**arguments):
    defaults = {
        "steps": 5,
        "stages": ("calibrate", "attention", "features"),
        "trainable": "maps",
        "batch_size": 32,
        "optimizer": None,
        "seed": 3,
        "callbacks": None,
        "verbose": "auto",
        "objective": "auto",
        "window_dropout": 0.25,
        "lora_rank": 8,
        "checkpoint_dir": None,
        "save_every": 100,
        "jit_compile": "auto",
        "max_rows": 512,
    }
    return Settings(**defaults | arguments)


def test_arguments_have_one_form():
    callback = keras.callbacks.Callback()
    found = settings(
        steps=np.int64(2),
        stages="features",
        trainable={"attention": "lora", "features": "all"},
        callbacks=callback,
        optimizer="adam",
        window_dropout=np.float32(0.5),
    )
    assert type(found.steps) is int and type(found.window_dropout) is float
    assert found.stages == ("features",) and found.callbacks == (callback,)
    assert isinstance(found.optimizer, keras.optimizers.Adam)
    # A stage that does not run asks for no adapter.
    assert found.trainable == {"features": "all"} and not found.adds_adapters
    both = settings(trainable={"features": "lora"})
    assert both.trainable == {"attention": "maps", "features": "lora"}
    assert both.adds_adapters
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.steps = 3


def test_seeds_are_random_unless_a_run_can_be_resumed():
    assert settings(seed=7).seed == 7
    assert settings(seed=None, checkpoint_dir="folder").seed == 0
    assert settings(seed=None).seed != settings(seed=None).seed


@pytest.mark.parametrize("name", ["favorpp", "hedgehog"])
def test_steps_are_divided_among_stages_and_rounds(name):
    layers = linear_layers(m.linear_model(name))
    calibration = [Stage("calibrate", 0, 0)] * (name == "favorpp")
    first = [Stage("attention", 3, 0), Stage("features", 2, 3)]
    second = [Stage("attention", 2, 5), Stage("features", 2, 7)]
    assert planned([5], settings(), layers) == [*calibration, *first]
    assert planned([5, 4], settings(), layers) == [*calibration, *first, *second]
    alone = settings(stages="features")
    assert planned([5], alone, layers) == [Stage("features", 5, 0)]

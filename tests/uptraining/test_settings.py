"""The arguments of `uptrain` in one form, and the plan of stages that follows."""

import dataclasses

import keras
import numpy as np
import pytest

from keras_rfattn.layers.recording import linear_layers
from keras_rfattn.uptraining import Checkpoint, Stage
from keras_rfattn.uptraining.settings import Settings
from keras_rfattn.uptraining.training import planned
from tests.uptraining import models as m

pytestmark = pytest.mark.once


def settings(**arguments):
    defaults = {
        "steps": 5,
        "stages": ("calibrate", "attention", "features"),
        "batch_size": 32,
        "optimizer": None,
        "seed": 3,
        "callbacks": None,
        "verbose": "auto",
    }
    return Settings.of(**defaults | arguments)


def test_arguments_have_one_form():
    callback, checkpoint = keras.callbacks.Callback(), Checkpoint("folder")
    found = settings(
        steps=np.int64(2),
        stages=["attention", Stage("features", window_dropout=np.float32(0.5))],
        callbacks=[checkpoint, callback],
        optimizer="adam",
    )
    attention, features = found.stages
    assert type(found.steps) is int and type(features.window_dropout) is float
    assert attention == Stage("attention")
    assert found.callbacks == (callback,) and found.checkpoint is checkpoint
    assert isinstance(found.optimizer, keras.optimizers.Adam)
    assert not found.adds_adapters
    assert settings(stages=Stage("features", trainable="lora")).adds_adapters
    assert settings(callbacks=callback).checkpoint is None
    with pytest.raises(AttributeError):
        found.steps = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        features.trainable = "all"


def test_stages_are_checked_when_they_are_made():
    for arguments, message in (
        ({"name": "logits"}, "`name` of a `Stage` .*'calibrate'"),
        ({"name": "features", "trainable": "query"}, "`trainable` of a `Stage`"),
        ({"name": "features", "objective": "loss"}, "`objective` of a `Stage`"),
        ({"name": "attention", "trainable": "all"}, "'maps', 'query_key' or 'lora'"),
        ({"name": "attention", "window_dropout": 1}, r"must be in \[0, 1\)"),
        ({"name": "features", "lora_rank": 0}, "`lora_rank` must be a positive"),
        ({"name": "attention", "max_rows": 2.5}, "`max_rows` must be a positive"),
        # Options of other stages.
        ({"name": "calibrate", "trainable": "lora"}, r"must be some of \(\)"),
        ({"name": "features", "max_rows": 3}, "'objective'.*Received: max_rows=3"),
        ({"name": "attention", "objective": "logits"}, "Received: objective='logits'"),
    ):
        with pytest.raises(ValueError, match=message):
            Stage(**arguments)


def test_stages_share_their_adapters():
    ranks = [Stage(x, trainable="lora") for x in ("attention", "features")]
    assert settings(stages=ranks).adds_adapters
    ranks[1] = Stage("features", trainable="lora", lora_rank=4)
    with pytest.raises(ValueError, match=r"must be the same .* Received: \[8, 4\]"):
        settings(stages=ranks)


def test_seeds_are_random_unless_a_run_can_be_resumed():
    assert settings(seed=7).seed == 7
    assert settings(seed=None, callbacks=Checkpoint("folder")).seed == 0
    assert settings(seed=None).seed != settings(seed=None).seed


@pytest.mark.parametrize("name", ["favorpp", "hedgehog"])
def test_steps_are_divided_among_stages(name):
    layers = linear_layers(m.linear_model(name))
    calibration = [("calibrate", 0, 0)] * (name == "favorpp")

    def plan(settings):
        found = planned(settings, layers)
        return [(x.stage.name, x.steps, x.first) for x in found]

    both = [("attention", 3, 0), ("features", 2, 3)]
    assert plan(settings()) == [*calibration, *both]
    assert plan(settings(stages="features")) == [("features", 5, 0)]

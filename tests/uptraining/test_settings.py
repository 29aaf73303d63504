"""The options of stages, the seed, and the plan of stages that follows."""

import dataclasses

import numpy as np
import pytest

from keras_rfattn.layers.recording import linear_layers
from keras_rfattn.uptraining import Stage
from keras_rfattn.uptraining.uptrain import checked_stages, planned
from tests.marks import slow_on_jax
from tests.uptraining import models as m

pytestmark = pytest.mark.once


def test_stages_are_checked_when_they_are_made():
    for arguments, message in (
        ({"name": "logits"}, "`name` must be one of .*'calibrate'"),
        ({"name": "features", "trainable": "lora"}, "`trainable` must be one of"),
        ({"name": "features", "objective": "loss"}, "`objective` must be one of"),
        ({"name": "attention", "trainable": "all"}, "must be 'maps' or 'query_key'"),
        ({"name": "attention", "window_dropout": 1}, r"must be in \[0, 1\)"),
        ({"name": "attention", "max_rows": 2.5}, "`max_rows` must be a positive"),
        # Options of other stages.
        ({"name": "calibrate", "trainable": "all"}, r"must be some of \(\)"),
        ({"name": "features", "max_rows": 3}, "'objective'.*Received: max_rows=3"),
        ({"name": "attention", "objective": "logits"}, "Received: objective='logits'"),
    ):
        with pytest.raises(ValueError, match=message):
            Stage(**arguments)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Stage("features").trainable = "all"


@slow_on_jax
def test_seeds_are_random_unless_a_run_can_be_resumed(tmp_path):
    model = m.linear_model("favorpp", num_features=4)

    def seed(**arguments):
        return m.uptrain(model, stages="calibrate", **arguments).seed

    assert seed(seed=np.int32(7)) == 7
    assert seed(seed=None, callbacks=m.checkpoint(tmp_path)) == 0
    assert seed(seed=None) != seed(seed=None)


@pytest.mark.parametrize("name", ["favorpp", "hedgehog"])
def test_steps_are_divided_among_stages(name):
    layers = linear_layers(m.linear_model(name))
    calibration = [("calibrate", 0, 0)] * (name == "favorpp")

    def plan(stages, steps):
        found = planned(checked_stages(stages), steps, layers)
        return [(stage.name, first, last) for stage, first, last in found]

    both = [("attention", 0, 3), ("features", 3, 5)]
    assert plan(("calibrate", "attention", "features"), 5) == [*calibration, *both]
    assert plan("features", 5) == [("features", 0, 5)]
    assert plan(["attention", Stage("features")], 1) == [
        ("attention", 0, 1), ("features", 1, 1),
    ]  # fmt: skip

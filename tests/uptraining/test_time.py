"""The time that `uptrain` takes is in its report."""

import time

import keras
import pytest

from keras_rfattn.uptraining.attention import AttentionStage
from tests.marks import slow_on_jax
from tests.uptraining import models as m

pytestmark = pytest.mark.once


@slow_on_jax
def test_stages_and_the_call_have_their_time():
    model = m.linear_model("favorpp_learned", num_features=8)
    start = time.perf_counter()
    report = m.uptrain(model, steps=4)
    wall = time.perf_counter() - start
    assert 0.5 * wall < report.seconds <= wall
    assert all(stage.seconds > 0 for stage in report.stages)
    assert sum(stage.seconds for stage in report.stages) < report.seconds
    lines = str(report).splitlines()
    names = [line.split("  ")[0] for line in lines[2 : lines.index("")]]
    assert names == ["calibrate", "attention", "features", "all"]


@pytest.mark.full
@pytest.mark.once
def test_an_interrupted_run_has_the_time_before_it(tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    checkpoint = m.checkpoint(tmp_path, 1)
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        callbacks = [checkpoint, Stop()]
        m.uptrain(m.linear_model(), callbacks=callbacks, stages="attention")
    first = time.perf_counter() - start
    start = time.perf_counter()
    report = m.uptrain(m.linear_model(), callbacks=checkpoint, stages="attention")
    second = time.perf_counter() - start
    assert 0.5 * second < report.seconds < first + second
    assert report.stages[0].seconds < report.seconds


@slow_on_jax
def test_measuring_is_compiled_once(monkeypatch):
    made = []
    make = AttentionStage.make_predict_function

    def counted(stage, force=False):
        if stage.predict_function is None or force:
            made.append(stage)
        return make(stage, force)

    monkeypatch.setattr(AttentionStage, "make_predict_function", counted)
    m.uptrain(m.linear_model(), steps=4)
    assert len(made) == 1

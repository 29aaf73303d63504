"""All of the time that `uptrain` takes is in its report."""

import time

import keras
import pytest

from keras_rfattn.uptraining import Checkpoint
from keras_rfattn.uptraining.attention import AttentionStage
from keras_rfattn.uptraining.report import OVERHEAD, Clock
from tests.marks import slow_on_jax
from tests.uptraining import models as m

pytestmark = pytest.mark.once


def test_a_clock_leaves_no_time_out(monkeypatch):
    now = iter([10.0, 11.0, 14.0, 14.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    clock = Clock()
    clock.lap("a")
    clock.lap("b")
    assert clock.lap("a") == 1.5
    clock.add({"b": 2.0, "c": 1.0})
    assert clock.seconds == {"a": 1.5, "b": 5.0, "c": 1.0}


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize("trainable", ["maps", "lora"])
def test_rows_add_up_to_the_time_of_the_call(trainable):
    model = m.linear_model("favorpp_learned", num_features=8)
    start = time.perf_counter()
    report = m.uptrain(model, steps=4, stages=m.stages(trainable=trainable))
    wall = time.perf_counter() - start
    assert 0.97 * wall < report.seconds <= wall
    overhead = dict(report.overhead)
    assert tuple(overhead) == OVERHEAD
    assert overhead["measuring before"] > 0 and overhead["measuring after"] > 0
    stages = sum(stage.seconds for stage in report.stages)
    assert report.seconds == pytest.approx(stages + sum(overhead.values()))
    lines = str(report).splitlines()
    names = [line.split("  ")[0] for line in lines[2 : lines.index("")]]
    assert names == ["calibrate", "attention", "features", "other", "all"]


@pytest.mark.full
@pytest.mark.once
def test_an_interrupted_run_has_the_time_before_it(tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise KeyboardInterrupt

    checkpoint = Checkpoint(tmp_path, every=1)
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        callbacks = [checkpoint, Stop()]
        m.uptrain(m.linear_model(), callbacks=callbacks, stages="attention")
    first = time.perf_counter() - start
    start = time.perf_counter()
    report = m.uptrain(m.linear_model(), callbacks=checkpoint, stages="attention")
    second = time.perf_counter() - start
    assert second < report.seconds < first + second


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

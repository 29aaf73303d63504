"""Weights of the checkpoint train on request, and the teacher stays what it was."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_rfattn
from keras_rfattn.uptraining import Stage
from tests import helpers as h
from tests.uptraining import models as m


def outputs(model, data=None):
    model.predict_function = None
    return model.predict(m.tokens() if data is None else data, verbose=0)


@pytest.mark.full
@pytest.mark.once
@pytest.mark.parametrize("trainable", ["query_key", "adapters", "all"])
def test_own_weights_train_against_what_they_were(trainable):
    softmax, adapts = m.softmax_model(), trainable == "adapters"
    if adapts:
        for i in range(2):
            layer = softmax.get_layer(f"attention_{i}")
            layer._query_dense.enable_lora(2)
            layer._key_dense.enable_lora(2)
        trainable = "query_key"
    wanted = outputs(softmax)
    model = keras_rfattn.replace_attention(softmax, "favorpp", num_features=16, seed=0)
    caught = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            stage = self.model
            if stage.name == "features_stage" and stage.optimizer.iterations == 3:
                ((output, _),) = stage.teacher(stage.outputs, m.tokens())
                caught.append(ops.convert_to_numpy(output))

    kinds = {"attention": "query_key"} if trainable == "all" else {}
    stages = [
        Stage(x, trainable=kinds.get(x, trainable)) for x in ("attention", "features")
    ]
    report = m.uptrain(
        model, stages=stages, callbacks=[Look()], optimizer=keras.optimizers.Adam(0.01),
    )  # fmt: skip
    # Three steps into the second stage the teacher is the checkpoint still.
    h.assert_close(caught[0], wanted, 1e-5)
    trained = {path.split("/")[-2] for path in report.trained}
    assert trained >= {"query", "key"}
    assert adapts == all("lora" in path or "bias" in path for path in report.trained)
    assert ("attention_output" in trained) == (trainable != "query_key")
    assert report.after < report.before
    keras_rfattn.restore_attention(model)
    if not adapts:
        with pytest.raises(AssertionError):
            h.assert_close(outputs(model), wanted, 1e-5)


@pytest.mark.full
@pytest.mark.once
def test_each_stage_trains_what_it_is_told_to():
    model = m.linear_model()
    own = {w.path: h.to_numpy(w) for w in model.weights if "feature_map" not in w.path}
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            moved = {
                w.path for w in model.weights
                if w.path in own and not np.array_equal(h.to_numpy(w), own[w.path])
            }  # fmt: skip
            seen.append((self.model.name, moved))

    stages = ["attention", Stage("features", trainable="all")]
    report = m.uptrain(model, stages=stages, callbacks=[Look()])
    (first, before), (second, after) = seen
    assert (first, second) == ("attention_stage", "features_stage")
    assert not before and after == set(report.trained)
    assert any("embedding" in path for path in after)


def test_calibration_alone():
    model = m.linear_model("favorpp", num_features=8)
    report = m.uptrain(model, stages="calibrate")
    assert [x.name for x in report.stages] == ["calibrate"]

"""Models made in the scope of a distribution strategy of TensorFlow."""

import json
import subprocess
import sys

import keras
import pytest

from tests.environment import environment

PROGRAM = """
import json
import keras
import numpy as np
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
devices = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(cpu, devices)
import keras_rfattn

x = np.random.default_rng(0).normal(size=(8, 6, 8)).astype("float32")

def softmax():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6, 8))
    return keras.Model(inputs, keras.layers.MultiHeadAttention(2, 4)(inputs, inputs))

def strategy():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

def refused(model):
    try:
        keras_rfattn.replace_attention(model, "hedgehog", seed=0)
    except ValueError as error:
        assert not any(hasattr(layer, "feature_map") for layer in model.layers)
        return str(error)

found, own, single = {}, strategy(), softmax()
with own.scope():
    mirrored = softmax()
for name, model in (("single", single), ("mirrored", mirrored)):
    # Outside of the scope.
    keras_rfattn.replace_attention(model, "favorpp_learned", num_features=4, seed=0)
    report = keras_rfattn.uptrain(model, x, steps=2, seed=0, batch_size=8, verbose=0)
    found[name] = report.before, report.after
with own.scope():
    mirrored.compile("sgd", "mse")
mirrored.fit(x, x, batch_size=8, verbose=0)
outside = softmax()
with own.scope():
    found["outside"] = refused(outside)
    inside = softmax()
with strategy().scope():
    found["another"] = refused(inside)
print(json.dumps(found))
"""


@pytest.mark.full
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="of TensorFlow")
def test_maps_are_made_where_the_model_was():
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment("tensorflow"), capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["mirrored"][0] == pytest.approx(found["single"][0], rel=1e-4)
    assert 0 < found["mirrored"][1] < found["mirrored"][0]
    assert "made outside of any strategy's scope. Leave the scope" in found["outside"]
    assert "made in the scope of MirroredStrategy" in found["another"]

"""On eight simulated devices a model computes and learns what it does on one."""

import json
import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_rfattn
from tests.environment import environment

pytest.importorskip("keras_hub")

PROGRAM = """
import json, sys
import keras, numpy as np
import keras_rfattn
from keras_rfattn.experimental.sequence_parallel import SequenceParallel
from tests.helpers import forward
from tests.models import families


def mean(x):
    return float(np.mean(np.abs(keras.ops.convert_to_numpy(x))))


def numbers(name, kind):
    keras.distribution.set_distribution(None)
    if kind == "data":
        keras.distribution.set_distribution(keras.distribution.DataParallel())
    model, inputs = families.build(name)
    keras_rfattn.replace_attention(model, "favorpp", num_features=16, seed=0)
    inputs = {k: np.repeat(x, 4, axis=0) for k, x in inputs.items()}
    split = 0
    if kind in ("model", "all"):
        shape, names = ((4, 2), ["batch", "model"])
        if kind == "all":
            shape, names = (2, 2, 2), ["batch", "model", "sequence"]
        devices = keras.distribution.list_devices()
        mesh = keras.distribution.DeviceMesh(shape, names, devices)
        layouts = keras_rfattn.distribution.layout_map(model, mesh)
        parallel = keras.distribution.ModelParallel
        if kind == "all":
            parallel = SequenceParallel
        keras.distribution.set_distribution(parallel(
            layout_map=layouts, batch_dim_name="batch"))
        keras_rfattn.distribution.distribute(model, layouts)
        for weight in model.weights:
            shards = weight.value.addressable_shards
            split += len({str(x.index) for x in shards}) == 2
    flat = keras.tree.flatten(forward(model)(inputs))
    used = len(flat[0].sharding.device_set)
    first = [mean(x) for x in flat]
    trainer = keras.Model(model.input, keras.tree.flatten(model(model.input))[0])
    trainer.compile(keras.optimizers.SGD(0.1), "mse")
    y = np.zeros(flat[0].shape, "float32")
    losses = trainer.fit(inputs, y, batch_size=8, epochs=3, verbose=0).history["loss"]
    return [split, used, *first, *losses, sum(map(mean, model.trainable_weights))]


name, *kinds = sys.argv[1:]
print(json.dumps([numbers(name, kind) for kind in kinds]))
"""


@pytest.mark.full
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="JAX simulates devices")
@pytest.mark.parametrize(
    ("name", "kinds"), [("gpt2", ("all",)), ("llama", ("data", "model"))]
)
def test_eight_devices_are_one(name, kinds):
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, name, "one", *kinds],
        env=environment("jax", cpu_devices=8), capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    alone, *others = json.loads(result.stdout.splitlines()[-1])
    _, used, *expected = alone
    assert used == 1 and expected[-2] != expected[-4]
    for kind, (split, used, *found) in zip(kinds, others, strict=True):
        assert used == 8 and (split > 10) == (kind != "data")
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_kv_heads_that_do_not_divide_stay_whole():
    from tests.models import families

    model, _ = families.build("llama")
    keras_rfattn.replace_attention(model, "favorpp", num_features=16, seed=0)
    devices = [f"cpu:{i}" for i in range(4)]
    mesh = keras.distribution.DeviceMesh((4,), ["model"], devices)
    names = {x.strip("^$").replace("\\", "") for x in _map(model, mesh)}
    assert any(x.endswith("query/kernel") for x in names)
    assert not any(x.endswith("key/kernel") or "feature_map" in x for x in names)
    mesh = keras.distribution.DeviceMesh((2,), ["model"], devices[:2])
    names = {x.strip("^$").replace("\\", "") for x in _map(model, mesh)}
    assert any(x.endswith("key/kernel") for x in names)
    assert any("feature_map/" in x for x in names)
    with pytest.raises(ValueError, match=r"one of the mesh, \['model'\].*'heads'"):
        keras_rfattn.distribution.layout_map(model, mesh, axis="heads")


def _map(model, mesh):
    return keras_rfattn.distribution.layout_map(model, mesh)

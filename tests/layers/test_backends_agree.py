"""The same weights give the same numbers on every backend."""

import subprocess
import sys

import keras
import numpy as np
import pytest

from keras_rfattn import feature_maps
from tests.conftest import own_maps
from tests.environment import environment

SCRIPT = """
import sys
import keras, numpy as np
import keras_rfattn
from tests.helpers import one_program
path, *maps = sys.argv[1:]
for file in maps:
    exec(compile(open(file).read(), file, "exec"), {"__name__": "a_map"})
rng = np.random.default_rng(0)
x = rng.normal(size=(2, 21, 8)).astype("float32")
mask = np.ones((2, 1, 21), bool)
mask[1, :, 15:] = False
results = {}
for name in keras_rfattn.feature_maps.list():
    layer = keras_rfattn.layers.MultiHeadAttention(2, 4, feature_map=name, seed=3)
    layer.build(x.shape, x.shape)
    # Signed maps divide by sums that nearly cancel: less so for small logits.
    size = 0.3 if layer.feature_map.is_positive else 0.1
    for weight in layer.trainable_weights:
        value = (rng.normal(size=weight.shape) * size).astype("float32")
        weight.assign(weight.constraint(value) if weight.constraint else value)
    for causal in (False, True):
        arguments = {"attention_mask": mask, "use_causal_mask": causal}
        call = one_program(lambda x: layer(x, x, **arguments))
        y = call(keras.ops.convert_to_tensor(x))
        results[f"{name} {causal}"] = keras.ops.convert_to_numpy(y)
    for weight in layer.feature_map.weights:
        results[f"{name} {weight.name}"] = keras.ops.convert_to_numpy(weight)
np.savez(path, **results)
"""


def results(backend, path, maps):
    """What `SCRIPT` saves on a backend; `maps` are files of maps it does not know."""
    if backend == keras.backend.backend():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["-c", str(path)])
            exec(SCRIPT, {})
    else:
        command = [sys.executable, "-c", SCRIPT, str(path), *map(str, maps)]
        subprocess.run(command, env=environment(backend), check=True)
    return dict(np.load(path))


@pytest.mark.full
def test_layers_agree(request, tmp_path):
    if keras.backend.backend() != "jax":
        pytest.skip("both others are compared with JAX, on JAX")
    here = results("jax", tmp_path / "here.npz", [])
    for other in ("tensorflow", "torch"):
        pytest.importorskip(other)
        there = results(other, tmp_path / f"{other}.npz", own_maps(request.config))
        assert len(here) == len(there) >= 2 * len(feature_maps.list())
        for name, expected in here.items():
            if name.endswith(("vectors", "draws")):
                np.testing.assert_array_equal(there[name], expected)
                continue
            is_positive = feature_maps.get(name.split()[0]).is_positive
            tolerance = 1e-5 if is_positive else 1e-4
            error = np.abs(there[name] - expected).max()
            assert error <= tolerance * max(np.abs(expected).max(), 1e-30), name

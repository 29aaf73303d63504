"""On several devices the losses are those of one."""

import json
import subprocess
import sys

import keras
import pytest

from tests.environment import environment

PROGRAM = """
import json, sys
import keras
from tests.uptraining import models as m

class Losses(keras.callbacks.Callback):
    found = []
    def on_train_batch_end(self, batch, logs=None):
        self.found.append(logs["loss"])

count = int(sys.argv[1])
assert len(keras.distribution.list_devices()) == count
if count > 1:
    keras.distribution.set_distribution(keras.distribution.DataParallel())
model = m.linear_model()
report = m.uptrain(model, steps=6, callbacks=[Losses()])
print(json.dumps([*Losses.found, report.before, report.after]))
"""


@pytest.mark.full
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="JAX simulates devices")
def test_four_devices_have_the_losses_of_one():
    found = {}
    for count in (1, 4):
        env = environment("jax", cpu_devices=count)
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(count)],
            env=env, capture_output=True, text=True,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr[-2000:]
        found[count] = json.loads(result.stdout.splitlines()[-1])
    assert len(found[1]) == 8 and found[1][0] != found[1][2]
    assert found[4] == pytest.approx(found[1], rel=1e-5)

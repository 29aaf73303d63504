"""A sequence over simulated devices is attended to as on one."""

import json
import subprocess
import sys

import keras
import pytest

from keras_rfattn.experimental.sequence_parallel import SequenceParallel
from tests.environment import environment

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="JAX divides sequences"
)

PROGRAM = r"""
import gc, json, re
import jax, keras, numpy as np
from jax import numpy as jnp
from keras_rfattn.experimental.sequence_parallel import SequenceParallel
from keras_rfattn.layers.attend import attend
from keras_rfattn.ops import AttentionMask, Options
from tests import helpers as h

devices = keras.distribution.list_devices()
mesh = keras.distribution.DeviceMesh((2, 4), ["batch", "sequence"], devices)
many = SequenceParallel(
    layout_map=keras.distribution.LayoutMap(mesh), batch_dim_name="batch")
maps = {x: h.build(x, kv_heads=2, head_dim=8) for x in ("favorpp", "polysketch")}

def arrays(length):
    draw = np.random.default_rng(0).standard_normal
    return [draw((2, length, n, 8)).astype("float32") for n in (4, 2, 2)]

def program(length, name, causal, options):
    mask = np.ones((2, length), bool)
    mask[0, :13], mask[1, 3 * length // 4 + 1:], mask[1, 5] = False, False, False
    mask = jnp.asarray(mask)

    def forward(*x):
        where = AttentionMask(mask, causal=causal, self_attention=True)
        # Queries of padding count their windows otherwise.
        output = attend(*x, maps[name], where, options=options)
        output = output * mask[:, :, None, None]
        return jnp.sum(output**2), output

    return jax.jit(jax.value_and_grad(forward, (0, 1, 2), has_aux=True))

def run(*case):
    (_, output), gradients = program(64, *case)(*arrays(64))
    return [np.asarray(x) for x in (output, *gradients)]

cases = [
    ("favorpp", True, Options()), ("favorpp", False, Options()),
    ("favorpp", False, Options(window=4, sliding=True, sinks=3)),
    ("polysketch", True, Options(window=4, sliding=True)),
    # Longer than the stretch of a device: left to the compiler.
    ("favorpp", True, Options(window=24)),
]
errors = []
for case in cases:
    keras.distribution.set_distribution(None)
    one = run(*case)
    keras.distribution.set_distribution(many)
    errors += [float(np.abs(x - y).max() / np.abs(x).max())
               for x, y in zip(one, run(*case))]

def exchanged(length, *case):
    text = program(length, *case).lower(*arrays(length)).compile().as_text()
    found = re.findall(r"= f32\[([0-9,]+)\]\S* (?:all-gather|collective-permute)\(",
                       text)
    return sum(int(np.prod([int(n) for n in x.split(",")])) for x in found)

numbers = [[exchanged(n, *cases[i]) for n in (64, 256)] for i in (0, 3)]

x, changed = arrays(64), arrays(64)
for a in changed:
    a[:, 48:] *= -3
where = AttentionMask(causal=True, self_attention=True)
call = jax.jit(lambda *x: attend(*x, maps["favorpp"], where))
first, second = (np.asarray(call(*a)) for a in (x, changed))
same = bool((first[:, :48] == second[:, :48]).all())
# Programs outlive the map they were compiled for, and serve equal ones.
for length in (64, 64, 128):
    other = h.build("favorplus", kv_heads=2, head_dim=8)
    attend(*arrays(length), other, where)
    del other
    gc.collect()
print(json.dumps([errors, numbers, same, bool((first != second).any())]))
"""


@pytest.mark.full
def test_many_devices_are_one():
    env = environment("jax", cpu_devices=8)
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-3000:]
    errors, numbers, same, changed = json.loads(result.stdout.splitlines()[-1])
    assert len(errors) == 20 and 0 < max(errors) < 1e-5
    for short, long in numbers:
        assert short == long > 0
    assert same and changed


def test_bad_meshes_are_named():
    mesh = keras.distribution.DeviceMesh((1,), ["batch"], ["cpu:0"])
    layouts = keras.distribution.LayoutMap(mesh)
    with pytest.raises(ValueError, match=r"axis of the mesh, \['batch'\].*'sequence'"):
        SequenceParallel(layout_map=layouts)
    with pytest.raises(ValueError, match=r"not the batch's, 'batch'"):
        SequenceParallel(layout_map=layouts, sequence_dim_name="batch")

"""Compiles for TPUs in a process of its own, whose flags the TPU's compiler knows.

python -m tests.tpu.program one v5e | kernels v5e | many v5e:4x4
"""

import dataclasses
import itertools
import json
import sys

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from keras_rfattn.experimental.sequence_parallel import over_devices
from keras_rfattn.layers.attend import attend
from keras_rfattn.ops import AttentionMask, Options
from tests import helpers as h

CHIPS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}


def devices(name):
    return topologies.get_topology_desc(platform="tpu", topology_name=name).devices


def arrays(where, length):
    return [
        jax.ShapeDtypeStruct((1, length, n, 64), "bfloat16", sharding=where)
        for n in (4, 2, 2)
    ]


def one(chip):
    """Bytes alive beside the arguments, without a window and with one."""
    feature_map = h.build("favorpp", kv_heads=2, head_dim=64)
    where, found = SingleDeviceSharding(devices(CHIPS[chip])[0]), []
    for options in (Options(), Options(window=128)):

        def loss(*x, options=options):
            mask = AttentionMask(causal=True, self_attention=True)
            output = attend(*x, feature_map, mask, options=options)
            return output.astype("float32").sum()

        program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arrays(where, 1024))
        found.append(program.compile().memory_analysis().temp_size_in_bytes)
    return found


def kernels(chip):
    """Bytes that programs of the Pallas kernels move, with their gradients."""
    feature_map = h.build("favorpp", kv_heads=2, head_dim=64)
    where, found = SingleDeviceSharding(devices(CHIPS[chip])[0]), []
    plain, window = Options(), Options(window=128)
    sliding = dataclasses.replace(window, sliding=True)
    for causal, options in itertools.product((True, False), (plain, window, sliding)):
        options = dataclasses.replace(options, implementation="pallas")

        def loss(*x, causal=causal, options=options):
            mask = AttentionMask(causal=causal, self_attention=True)
            output = attend(*x, feature_map, mask, options=options)
            return output.astype("float32").sum()

        program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arrays(where, 1024))
        assert "tpu_custom_call" in program.as_text()
        found.append(program.compile().cost_analysis()["bytes accessed"])
    return found


def many(topology):
    """Shapes of what chips gather, at one length of a stretch and at twice that."""
    feature_map = h.build("favorpp", kv_heads=2, head_dim=64)
    chips = devices(topology)
    mesh = Mesh(np.array(chips), ("sequence",))
    where = NamedSharding(mesh, PartitionSpec(None, "sequence"))

    def forward(query, key, value):
        features = h.featurized(feature_map, query, key, causal=True)
        return over_devices(
            *features, value, None, None, Options(), True, mesh, "sequence"
        )

    found = []
    for length in (64 * len(chips), 128 * len(chips)):
        text = jax.jit(forward).lower(*arrays(where, length)).compile().as_text()
        lines = [x for x in text.splitlines() if " all-gather" in x and "=" in x]
        shapes = {x.split("=")[1].split("{")[0].strip() for x in lines}
        found.append(sorted(shapes))
    return [len(chips), *found]


if __name__ == "__main__":
    print(
        json.dumps(
            {"one": one, "kernels": kernels, "many": many}[sys.argv[1]](sys.argv[2])
        )
    )

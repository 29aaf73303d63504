"""Programs compile for TPUs, one and many, by the compiler of the `tpu` extra."""

import importlib.metadata
import json
import subprocess
import sys

import keras
import pytest

from tests.environment import environment


def has_compiler():
    try:
        importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="JAX compiles them"),
    pytest.mark.skipif(not has_compiler(), reason="needs the extra `tpu`"),
]


def run(*arguments):
    env = environment("jax")
    # The tests' flags are the CPU's.
    del env["XLA_FLAGS"]
    env |= {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    result = subprocess.run(
        [sys.executable, "-m", "tests.tpu.program", *arguments],
        env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("chip", ["v4", "v5e", "v5p", "v6e"])
def test_one_chip(chip):
    # With a window the compiler has told of no bytes at all.
    without, _ = run("one", chip)
    assert without > 0


@pytest.mark.parametrize("chip", ["v4", "v5e", "v5p", "v6e"])
def test_kernels_compile(chip):
    # Causal and not, by features alone, with a window, with a sliding one.
    found = run("kernels", chip)
    assert len(found) == 6 and min(found) > 0


@pytest.mark.parametrize(("topology", "size"), [("v5e:2x2", 4), ("v5e:4x4", 16)])
def test_chips_gather_the_same_at_any_length(topology, size):
    count, short, long = run("many", topology)
    assert count == size and short == long != []

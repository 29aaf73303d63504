"""Environment variables of the tests' processes."""

import os
import pathlib

# Most programs here run once: compiling them costs more than running them.
XLA_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)


def environment(backend=None):
    """Of a process that imports this project from here, on a backend if given."""
    root = str(pathlib.Path(__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": root}
    if backend is not None:
        env["KERAS_BACKEND"] = backend
    if backend == "jax":
        env["XLA_FLAGS"] = XLA_FLAGS
    return env

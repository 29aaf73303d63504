"""Environment variables of the processes that tests start, and of their own."""

import functools
import os
import pathlib
import subprocess
import sys

# Most programs here run once: compiling them costs more than running them.
XLA_FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)


@functools.cache
def xla_flags(flags=XLA_FLAGS):
    """Returns those of `flags` that the installed XLA knows, as one string.

    XLA ends a process whose `XLA_FLAGS` holds one unknown flag, and releases drop
    flags. A child process therefore tries them first, in about a second.

    Args:
        flags: Tuple of strings, each `--name=value`.

    Raises:
        RuntimeError: If JAX does not start for a reason other than a flag. The
            message holds what the child wrote to stderr.
    """
    while True:
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
        result = subprocess.run(
            [sys.executable, "-c", "import jax; jax.devices()"],
            env={**env, "XLA_FLAGS": " ".join(flags)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if result.returncode == 0:
            return " ".join(flags)
        known = tuple(flag for flag in flags if flag not in result.stderr)
        if known == flags:
            raise RuntimeError(
                f"JAX must start with XLA_FLAGS={' '.join(flags)!r}. Received: exit "
                f"status {result.returncode} and this on stderr:\n{result.stderr}"
            )
        flags = known


def environment(backend=None, cpu_devices=1):
    """Returns the environment of a process that imports this project from here.

    Args:
        backend: Name of the Keras backend; `None` keeps the one of this process.
        cpu_devices: Number of devices that JAX makes of the CPU.
    """
    root = str(pathlib.Path(__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": root}
    if backend is not None:
        env["KERAS_BACKEND"] = backend
    if backend == "jax":
        env["XLA_FLAGS"] = os.environ.get("XLA_FLAGS") or xla_flags()
    if cpu_devices > 1:
        env["JAX_NUM_CPU_DEVICES"] = str(cpu_devices)
    return env

import gc
import os

import pytest

from tests.environment import XLA_FLAGS

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if os.environ.get("KERAS_BACKEND") == "jax":
    os.environ.setdefault("XLA_FLAGS", XLA_FLAGS)


def pytest_collection_finish():
    # Neither a garbage collection nor this package's search for KerasHub's tasks, in
    # every replacement, need look through all that imports have left.
    gc.freeze()


@pytest.fixture(autouse=True)
def global_seed():
    # Maps and initializers without a seed of their own draw from the global one.
    import keras

    keras.utils.set_random_seed(0)


TESTS_BETWEEN_CHECKS = 40
MOST_MEMORY_MAPS = 30_000  # of the 65530 that Linux allows a process
count = 0


@pytest.fixture(autouse=True)
def few_memory_maps():
    # Every program that JAX compiles keeps some, and XLA crashes without.
    global count
    yield
    count += 1
    if os.environ.get("KERAS_BACKEND") == "jax" and count % TESTS_BETWEEN_CHECKS == 0:
        with open("/proc/self/maps") as maps:
            crowded = sum(1 for _ in maps) > MOST_MEMORY_MAPS
        if crowded:
            import jax

            jax.clear_caches()

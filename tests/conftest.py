import gc
import importlib.util
import os
import pathlib
import shutil

import pytest

from tests import marks
from tests.environment import xla_flags

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if os.environ.get("KERAS_BACKEND") == "jax" and "XLA_FLAGS" not in os.environ:
    # Processes that tests start, those of pytest-xdist too, inherit the answer.
    os.environ["XLA_FLAGS"] = xla_flags()
if shutil.which("nvidia-smi") is None:
    # Triton reads this when it is first imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


EXAMPLES = pathlib.Path(__file__).parent / "feature_maps" / "examples"


def own_maps(config):
    """Files of maps from outside the package: `--map`, or CONTRIBUTING's example."""
    return config.getoption("--map") or [EXAMPLES / "squared_relu.py"]


def pytest_configure(config):
    for file in own_maps(config):
        if not pathlib.Path(file).is_file():
            raise pytest.UsageError(f"`--map` must be a file. Received: --map={file}.")
        name = f"{pathlib.Path(file).stem}_of_an_option"
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        from keras_rfattn import feature_maps

        before = set(feature_maps.list())
        spec.loader.exec_module(module)
        added = set(feature_maps.list()) - before
        if not added:
            raise pytest.UsageError(
                f"`--map` must be a file that registers a feature map. Received: "
                f'--map={file}. Decorate the class by `@feature_maps.register("name")`.'
            )
        is_option = str(file) in config.getoption("--map")
        marks.OWN.update(dict.fromkeys(added, file if is_option else None))


def own_map(item):
    """Returns the name of the map from outside the package that a test is for."""
    parameters = getattr(item, "callspec", None)
    values = parameters.params.values() if parameters else ()
    return next((x for x in values if isinstance(x, str) and x in marks.OWN), None)


def pytest_collection_modifyitems(config, items):
    if config.getoption("--map"):
        config.hook.pytest_deselected(items=[x for x in items if not own_map(x)])
        items[:] = [x for x in items if own_map(x)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    except AssertionError as error:
        name = own_map(item)
        if name is None:
            raise
        # Each test describes in its own words what infinite features lead to.
        from tests.helpers import what_is_not_finite

        if sentence := what_is_not_finite(name):
            raise AssertionError(sentence) from error
        raise


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
    if count % TESTS_BETWEEN_CHECKS:
        return
    if os.environ.get("KERAS_BACKEND") == "jax":
        with open("/proc/self/maps") as maps:
            crowded = sum(1 for _ in maps) > MOST_MEMORY_MAPS
        if crowded:
            import jax

            gc.unfreeze()
            jax.clear_caches()
    # What compiled programs keep would be gone through by every collection, of which
    # Keras' `quantize` asks for one a layer.
    gc.collect()
    gc.freeze()

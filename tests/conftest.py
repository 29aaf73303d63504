import os

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if os.environ.get("KERAS_BACKEND") == "jax":
    # Most programs here run once: compiling them costs more than running them.
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    )


@pytest.fixture(autouse=True)
def global_seed():
    # Maps and initializers without a seed of their own draw from the global one.
    import keras

    keras.utils.set_random_seed(0)

import os

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


@pytest.fixture(autouse=True)
def global_seed():
    # Maps and initializers without a seed of their own draw from the global one.
    import keras

    keras.utils.set_random_seed(0)

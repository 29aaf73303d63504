import keras
import pytest


@pytest.fixture(autouse=True)
def uncompiled_on_tensorflow(request):
    """Tracing takes TensorFlow longer than the few steps of most of these tests."""
    if keras.backend.backend() != "tensorflow" or "compiled" in request.node.name:
        yield
        return
    import tensorflow as tf

    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)

import keras
from keras import ops

from keras_rfattn import feature_maps


@feature_maps.register("squared_relu")
@keras.saving.register_keras_serializable("my_project")
class SquaredRelu(feature_maps.Activation):
    """Features `(relu(w · x)² + 0.001) / √m`."""

    def log_activation(self, z):
        return ops.log(ops.relu(z) ** 2 + 1e-3)

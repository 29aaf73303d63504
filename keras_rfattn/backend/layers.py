"""Operations on layers and models that differ between backends."""

import keras

from keras_rfattn.backend import without_gradients


def track_variables_anew(layer):
    """Updates PyTorch's own list of a layer's variables after variables changed."""
    if keras.backend.backend() == "torch" and layer.built:
        layer._track_variables()


def strategies(variable):
    """Returns the TensorFlow strategies of a variable and of the current scope."""
    if keras.backend.backend() != "tensorflow":
        return None, None
    import tensorflow as tf

    own = getattr(variable.value, "distribute_strategy", None)
    current = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
    return own, current


def compiled_for_inference(function, model):
    """Compiles a function of a model as Keras compiles `predict`, without gradients."""
    backend = keras.backend.backend()
    if backend == "torch":
        return without_gradients()(function)
    if getattr(model, "run_eagerly", False):
        return function
    if backend == "tensorflow":
        import tensorflow as tf

        return tf.function(function)
    import jax

    @jax.jit
    def compiled(values, *args):
        mapping = zip(model.variables, values, strict=True)
        with keras.StatelessScope(state_mapping=list(mapping)):
            return function(*args)

    def call(*args):
        return compiled([x.value for x in model.variables], *args)

    return call

"""Answers questions about compilation, datasets and weights, which backends differ in.

Attention algorithms do not need these answers; the code that runs training does.
"""

import itertools

import keras


def backend_name():
    """Returns the name of the backend, for files that say on which they were made."""
    return keras.backend.backend()


def compiles_each_length():
    """Returns whether the backend compiles a program for every sequence length."""
    return keras.backend.backend() != "torch"


def donates_weights():
    """Returns whether a step that is interrupted leaves a model without weights."""
    return keras.backend.backend() == "jax"


def dataset_of(batches):
    """Returns an iterator over batches in a form that `keras.Model.fit` accepts."""
    if keras.backend.backend() != "tensorflow":
        return batches
    import tensorflow as tf

    # TensorFlow would turn a list of arrays into one array.
    batches = map(keras.tree.lists_to_tuples, batches)
    first = next(batches)

    def signature(x):
        # Batch and token axes may vary; images have more axes and keep their size.
        variable_axes = 2 if x.ndim in (2, 3) else 1
        shape = (None,) * variable_axes + x.shape[variable_axes:]
        return tf.TensorSpec(shape, x.dtype)

    return tf.data.Dataset.from_generator(
        lambda: itertools.chain([first], batches),
        output_signature=keras.tree.map_structure(signature, first),
    )

"""The operations that TensorFlow needs in another form than `common` gives them.

LiteRT, to which TensorFlow programs are exported, has no loops, and limits several
operations to arrays of five axes.
"""

import functools

import tensorflow as tf
from keras import ops

from keras_rfattn.backend import common
from keras_rfattn.backend.sizes import is_known


def take_tokens(x, index):
    # `ops.take_along_axis` fails if a batch of unknown size is empty.
    return tf.gather(x, index, axis=1, batch_dims=1)


def num_blocks(length, size):
    count = common.num_blocks(length, size)
    return count if is_known(count) else ops.maximum(count, 1)


def is_plain(*arrays):
    return not any(tf.is_symbolic_tensor(x) for x in arrays if tf.is_tensor(x))


def compiled(function, /, **options):
    """Returns a `tf.function` of the current graph, or the function itself if eager."""
    if tf.executing_eagerly():
        return functools.partial(function, **options)
    graph = tf.compat.v1.get_default_graph()
    # The graph may be a proxy, whose `__dict__` lacks the attributes of the graph.
    if not hasattr(graph, "_rfattn_functions"):
        graph._rfattn_functions = {}
    key = function, tuple(options.items())
    if key not in graph._rfattn_functions:
        call = functools.partial(function, **options)
        graph._rfattn_functions[key] = tf.function(call, autograph=False)
    return graph._rfattn_functions[key]

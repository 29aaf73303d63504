"""Tells self-attention from cross-attention.

Statistics of the sequence, windows and packed rows need to know which it is. Whether
the arguments of a call are the same object does not tell: a compiled function, a
vectorized one or a checkpoint passes the same tokens as separate arguments. Objects are
therefore compared only in the graph of a model, where nothing is computed, and in a
layer's first call, which decides for all its later ones, as it does for sizes.
"""

import keras

from keras_rfattn.backend import is_plain

ARGUMENTS = "query", "value", "key"


def tokens_of(args, kwargs):
    """Returns query, value and key among the arguments of an attention layer's call."""
    arguments = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
    return [arguments.get(name) for name in ARGUMENTS]


def in_graph(layer):
    """Returns whether all calls in models' graphs are self-attention."""
    calls = [node.arguments for node in layer._inbound_nodes]
    same = [_are_same(*tokens_of(call.args, call.kwargs)) for call in calls]
    return all(same) if same else None


def is_self_attention(layer, query, value, key=None):
    """Returns whether a call is self-attention, or `None` if nothing tells."""
    if value is None or _differ_in_length(query, value):
        return False
    known = layer.self_attention
    known = in_graph(layer) if known is None else known
    if known is not None:
        return known
    is_same = _are_same(query, value, key)
    if isinstance(query, keras.KerasTensor):
        return is_same
    if is_plain(query, value):
        layer.self_attention = is_same
    elif not is_same:
        return None
    return is_same


def _are_same(query, value, key=None):
    return query is value and (key is None or key is value)


def _differ_in_length(query, value):
    shapes = (getattr(x, "shape", ()) for x in (query, value))
    lengths = [shape[1] for shape in shapes if len(shape) > 1]
    return len({n for n in lengths if isinstance(n, int)}) > 1

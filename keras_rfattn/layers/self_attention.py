"""Tells self-attention from cross-attention.

Statistics of the sequence, windows and packed rows need to know which it is. Whether
the arguments of a call are the same object does not tell alone: a compiled function, a
vectorized one or a checkpoint passes the same tokens as separate arguments. A layer
therefore remembers the kinds of its calls that nothing traced, and takes separate
arguments of a traced call for the kind that it knows.
"""

import keras
from keras import ops

from keras_rfattn.backend import is_plain

ARGUMENTS = "query", "value", "key"


def tokens_of(args, kwargs):
    """Returns query, value and key among the arguments of an attention layer's call."""
    arguments = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
    return [arguments.get(name) for name in ARGUMENTS]


def kinds_in_graph(layer):
    """Returns the set of whether calls in models' graphs are self-attention."""
    calls = [node.arguments for node in layer._inbound_nodes]
    return {_are_same(*tokens_of(call.args, call.kwargs)) for call in calls}


def in_graph(layer):
    """Returns whether calls in models' graphs are self-attention; `None` if unclear."""
    return _only(kinds_in_graph(layer))


def is_self_attention(layer, query, value, key=None):
    """Returns whether a call is self-attention, or `None` if nothing tells."""
    if value is None or _differ_in_length(query, value):
        return False
    if layer.self_attention is not None:
        return layer.self_attention
    in_graphs, kinds = kinds_in_graph(layer), layer.kinds_of_calls
    if len(in_graphs) == 1:
        return _only(in_graphs)
    is_same, key = _are_same(query, value, key), value if key is None else key
    if isinstance(query, keras.KerasTensor):
        return is_same
    if not is_plain(query, value, key):
        # Only objects tell apart the calls of a layer that a graph uses in both ways.
        return True if is_same else False if in_graphs else _only(kinds)
    if not is_same and True in kinds | in_graphs:
        # A checkpoint, for example, computes again with copies.
        is_same = _are_equal(query, value) and _are_equal(value, key)
    if is_same not in kinds:
        layer.kinds_of_calls = kinds | {is_same}
    return is_same


def _only(kinds):
    return next(iter(kinds)) if len(kinds) == 1 else None


def _are_same(query, value, key=None):
    return query is value and (key is None or key is value)


def _are_equal(x, y):
    if x is y or tuple(x.shape) != tuple(y.shape):
        return x is y
    both_nan = ops.logical_and(ops.isnan(x), ops.isnan(y))
    return bool(ops.all(ops.logical_or(ops.equal(x, y), both_nan)))


def _differ_in_length(query, value):
    shapes = (getattr(x, "shape", ()) for x in (query, value))
    lengths = [shape[1] for shape in shapes if len(shape) > 1]
    return len({n for n in lengths if isinstance(n, int)}) > 1

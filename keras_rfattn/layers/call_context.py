"""What one call of an attention layer knows besides its arguments.

Keras and KerasHub call hooks of a layer, such as `_compute_attention`, with fewer
arguments than linear attention needs. The rest is kept here, never in an attribute of
the layer: a thread sees only what it has set itself, and nothing outlives the `with`
that has set it, whatever raises inside.
"""

import contextlib
import dataclasses
import threading
from typing import Any


class PerThread(threading.local):
    """A value of which each thread has its own; `None` unless set.

    Not a `contextvars.ContextVar`, which `torch.compile` cannot trace.
    """

    def __init__(self):
        # In every thread, as guards of `torch.compile` cannot tell an attribute that
        # is missing from a default of the class.
        self.value = None

    @contextlib.contextmanager
    def holding(self, value):
        """Sets the value until the `with` ends."""
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before


class PerObject(PerThread):
    """A value for each of some objects, set by a thread and seen by it alone."""

    def get(self, owner, default=None):
        """The value of an object, or `default`."""
        if not self.value:
            return default
        _, value = self.value.get(id(owner), (owner, default))
        return value

    def giving(self, owner, value):
        """Sets the value of one object until the `with` ends."""
        # With the object, whose id stays its own while it is alive.
        return self.holding({**(self.value or {}), id(owner): (owner, value)})


@dataclasses.dataclass(frozen=True)
class CallContext:
    """One call of an attention layer.

    Attributes:
        layer: The layer; no other sees this context.
        self_attention: Whether queries, keys and values are the same tokens.
        segment_ids: Integers `(B, T)` of packed rows, or `None`.
        mask: `AttentionMask` in place of the mask that the layer's class is given, or
            `None` for that one.
        recorder: What watches the layer or answers for it (see `attend`), or `None`.
    """

    layer: Any
    self_attention: bool = False
    segment_ids: Any = None
    mask: Any = None
    recorder: Any = None

    def active(self):
        """The layer's hooks see this context until the `with` ends."""
        return _CALL.holding(self)

    def replace(self, **changes):
        """A copy with some attributes changed."""
        return dataclasses.replace(self, **changes)


_CALL = PerThread()
_RECORDERS = PerObject()
_HANDED = PerThread()


def context_of(layer, self_attention=False):
    """The `CallContext` of a layer's call.

    Args:
        layer: An attention layer.
        self_attention: What holds where the layer's `call` was called directly.
    """
    context = _CALL.value
    if context is not None and context.layer is layer:
        return context
    return CallContext(layer, self_attention, recorder=recorder_of(layer))


def recorder_of(layer):
    """What answers for a layer in this thread, else its attribute `recorder`."""
    return _RECORDERS.get(layer, layer.recorder)


def answered_by(layer, recorder):
    """A `with` in which `recorder` answers for a layer, in this thread alone."""
    return _RECORDERS.giving(layer, recorder)


def hand_over(array, mask):
    """Lets `array`, as an attention layer's mask in this thread, stand for `mask`.

    It means nothing for any other array, so that nobody need take it back.
    """
    _HANDED.value = array, mask


def taken_over(array):
    """The mask for which an array stands, or the array."""
    handed = _HANDED.value
    if array is None or handed is None or handed[0] is not array:
        return array
    _HANDED.value = None
    return handed[1]

"""Holds the context of a call to an attention layer: what its arguments do not say.

Keras and KerasHub call hooks of a layer, such as `_compute_attention`, with fewer
arguments than linear attention needs. The remaining information is stored here, not in
an attribute of the layer. Each thread sees only values that it has set itself. A value
is reset when the `with` block that set it ends, even if the block raises.
"""

import abc
import contextlib
import dataclasses
import threading
from typing import Any


class PerThread(threading.local):
    """A separate value for each thread, `None` until the thread sets it."""

    # Not a `contextvars.ContextVar`, because `torch.compile` cannot trace one.

    def __init__(self):
        # `threading.local` calls this in every thread. It is no class attribute,
        # because guards of `torch.compile` confuse a missing attribute of the instance
        # with the default of the class.
        self.value = None

    @contextlib.contextmanager
    def holding(self, value):
        """Context manager that sets the value for the current thread."""
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before


class PerObject(PerThread):
    """Separate values for each thread and each object."""

    def get(self, owner, default=None):
        """Returns the value of an object, or `default` if none is set."""
        if not self.value:
            return default
        _, value = self.value.get(id(owner), (owner, default))
        return value

    def giving(self, owner, value):
        """Context manager that sets the value of one object for the current thread."""
        # The object is stored too. This keeps it alive, so that no other object can
        # have its id.
        return self.holding({**(self.value or {}), id(owner): (owner, value)})


class Interceptor(abc.ABC):
    """Observes a linear attention layer, or computes its output in its place."""

    # A layer looks for an interceptor in its `CallContext` first, and then in its
    # attribute `recorder`. A plain function has the same effect as an interceptor
    # that defines `__call__` alone.

    @abc.abstractmethod
    def __call__(self, call):
        """Returns the output of the layer's linear heads, or `None` to compute it."""

    def around(self, layer, function, args, kwargs):
        """Calls the layer; a subclass may change its arguments and its output."""
        return function(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class CallContext:
    """The context of one call of an attention layer."""

    layer: Any  # other layers do not see this context
    self_attention: bool | None = False  # `None` if it is unknown
    segment_ids: Any = None  # (B, T), the number of each token's text in packed rows
    mask: Any = None  # `AttentionMask` in place of the one that is passed
    recorder: Any = None  # an `Interceptor` or a function

    def active(self):
        """Context manager in which the layer sees this context, in this thread."""
        return _CONTEXTS.giving(self.layer, self)

    def replace(self, **changes):
        """Returns a copy with some attributes changed."""
        return dataclasses.replace(self, **changes)


_CONTEXTS = PerObject()
_HANDED = PerThread()


def context_of(layer, self_attention=False):
    """Returns the active `CallContext` of a layer, or a new one if there is none."""
    context = _CONTEXTS.get(layer)
    if context is None:
        return CallContext(layer, self_attention, recorder=layer.recorder)
    return context


def hand_over(array, mask):
    """Makes `array` stand for `mask` in this thread."""
    _HANDED.value = array, mask


def taken_over(array):
    """Returns the mask for which an array stands (see `hand_over`), or the array."""
    handed = _HANDED.value
    if array is None or handed is None or handed[0] is not array:
        return array
    _HANDED.value = None
    return handed[1]

"""Temporarily replaces a layer's `call` by another function, for one thread."""

import contextlib
import threading

from keras_rfattn.layers.call_context import PerThread

_LOCK = threading.Lock()


class ReplacedCall:
    """The `call` of a layer instance while at least one thread replaces it.

    Attributes:
        before: The instance attribute `call` before the replacement, or `None`.
        call: The layer's own `call`, for threads that do not replace it.
        replacement: `PerThread` value, the function that replaces `call`.
        users: Number of active `with` blocks that need this object, in all threads.
    """

    def __init__(self, layer):
        self.before, self.call = vars(layer).get("call"), layer.call
        self.replacement, self.users = PerThread(), 0

    def current(self):
        """Returns the function that the current thread calls."""
        return self.replacement.value or self.call

    def __call__(self, *args, **kwargs):
        return self.current()(*args, **kwargs)


@contextlib.contextmanager
def replacing_call(layer, around):
    """Context manager that replaces a layer's `call` in the current thread."""
    with _LOCK:
        replaced = vars(layer).get("call")
        if not isinstance(replaced, ReplacedCall):
            replaced = ReplacedCall(layer)
            # Keras must not track this attribute, which is temporary.
            vars(layer)["call"] = replaced
        replaced.users += 1
    try:
        with replaced.replacement.holding(around(replaced.current())):
            yield
    finally:
        with _LOCK:
            replaced.users -= 1
            if not replaced.users and replaced.before is None:
                del vars(layer)["call"]
            elif not replaced.users:
                vars(layer)["call"] = replaced.before

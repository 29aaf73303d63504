"""Temporarily replaces a layer's `call` by another function, for one thread."""

import contextlib
import threading

from keras_rfattn.layers.call_context import PerThread

_LOCK = threading.Lock()


class ReplacedCall:
    """The `call` of a layer instance while at least one thread replaces it."""

    def __init__(self, layer):
        self.before = vars(layer).get("call")  # the instance's attribute, if any
        self.call = layer.call  # for threads that do not replace it
        self.replacement = PerThread()
        self.users = 0  # active `with` blocks, in all threads

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

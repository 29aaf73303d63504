"""Another function in place of a layer's `call`, for one thread and for a while."""

import contextlib
import threading

from keras_rfattn.layers.call_context import PerThread

_LOCK = threading.Lock()


class ReplacedCall:
    """An instance's `call` while some thread answers for it.

    Attributes:
        before: What the instance had under that name, or `None`.
        call: The layer's own `call`, for threads that do not.
        answer: `PerThread`, the function that answers.
        users: How many `with`s need this, in all threads.
    """

    def __init__(self, layer):
        self.before, self.call = vars(layer).get("call"), layer.call
        self.answer, self.users = PerThread(), 0

    def current(self):
        """The function that this thread calls."""
        return self.answer.value or self.call

    def __call__(self, *args, **kwargs):
        return self.current()(*args, **kwargs)


@contextlib.contextmanager
def answering(layer, around):
    """This thread calls another function in place of a layer's `call` meanwhile.

    Args:
        layer: A Keras layer.
        around: `call -> function`, of what would be called otherwise.
    """
    with _LOCK:
        replaced = vars(layer).get("call")
        if not isinstance(replaced, ReplacedCall):
            replaced = ReplacedCall(layer)
            # Past Keras' tracking: it is gone before anything could be saved.
            object.__setattr__(layer, "call", replaced)
        replaced.users += 1
    try:
        with replaced.answer.holding(around(replaced.current())):
            yield
    finally:
        with _LOCK:
            replaced.users -= 1
            if not replaced.users and replaced.before is None:
                object.__delattr__(layer, "call")
            elif not replaced.users:
                object.__setattr__(layer, "call", replaced.before)

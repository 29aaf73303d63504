"""Ctrl-C, between steps alone."""

import contextlib
import signal
import threading


class Interrupts:
    """Holds an interrupt back; a second one is not held.

    A step that is broken off within leaves a model without weights on JAX, which gives
    their memory to those that come.

    Attributes:
        is_pending: Whether there was one.
    """

    is_pending = False

    @contextlib.contextmanager
    def held(self):
        """Meanwhile; raises `KeyboardInterrupt` at the end if there was one."""
        is_main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGINT) if is_main else None
        # Whoever handles it otherwise goes on to.
        if before is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, self._hold)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
        if self.is_pending:
            raise KeyboardInterrupt

    def _hold(self, number, frame):
        if self.is_pending:
            raise KeyboardInterrupt
        self.is_pending = True

"""Delays Ctrl-C until the current training step is complete."""

import contextlib
import signal
import threading


class Interrupts:
    """Holds back the first interrupt; a second one raises at once.

    On JAX, a step that is interrupted leaves the model without weights, because JAX
    reuses (donates) their memory for the new ones.

    Attributes:
        is_pending: Whether an interrupt is being held back.
    """

    is_pending = False

    @contextlib.contextmanager
    def held(self):
        """Context manager that holds an interrupt back until its end.

        Raises:
            KeyboardInterrupt: At the end, if there was an interrupt.
        """
        is_main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGINT) if is_main else None
        # A custom handler for Ctrl-C stays in charge.
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

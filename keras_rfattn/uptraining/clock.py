"""Measures how uptraining spends its time."""

import time

# Names of everything that is not a stage, in the order in which it begins.
PREPARING, BEFORE = "preparing", "measuring before"
SAVING, AFTER = "saving", "measuring after"
OVERHEAD = PREPARING, BEFORE, SAVING, AFTER


class Clock:
    """Assigns all of the time since its creation to names.

    Attributes:
        seconds: Dict from names to seconds.
    """

    def __init__(self):
        self.seconds, self.last = {}, time.perf_counter()

    def lap(self, name):
        """Adds the time since the last lap to a name, and returns the name's total."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.last
        self.last = now
        return self.seconds[name]

    def add(self, seconds):
        """Adds the time of an interrupted run.

        Args:
            seconds: Dict from names to seconds.
        """
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value

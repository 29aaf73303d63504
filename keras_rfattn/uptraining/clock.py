"""Where the time of an uptraining goes."""

import time

# What is not a stage, in the order in which it begins.
PREPARING, BEFORE = "preparing", "measuring before"
SAVING, AFTER = "saving", "measuring after"
OVERHEAD = PREPARING, BEFORE, SAVING, AFTER


class Clock:
    """Shares out all of the time since it was made among names.

    Attributes:
        seconds: Dict of seconds by name.
    """

    def __init__(self):
        self.seconds, self.last = {}, time.perf_counter()

    def lap(self, name):
        """Adds the time since the last lap to a name; all of its seconds so far."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.last
        self.last = now
        return self.seconds[name]

    def add(self, seconds):
        """Adds what an interrupted run took, a dict as of `seconds`."""
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value

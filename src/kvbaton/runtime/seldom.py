"""How often somebody else's mistakes are logged: whoever floods the side channel does not flood the log."""

from __future__ import annotations

import time
from collections.abc import Callable

INTERVAL_S = 10.0


class Seldom:
    """Counts what happens, and says so at most once per interval."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_untold = 0
        self._next_s = float("-inf")

    def add(self, count: int = 1) -> int:
        """How many there were since they were last told, when it is time to tell; else 0."""
        self._num_untold += count
        now_s = self._clock()
        if now_s < self._next_s:
            return 0
        self._next_s = now_s + INTERVAL_S
        told, self._num_untold = self._num_untold, 0
        return told

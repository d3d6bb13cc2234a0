"""What is counted, measured and waiting in this worker, for the engine's metrics.

The driver's thread adds; the engine's thread takes. Invariant: the lock guards a few dictionary operations and is never
held across I/O. Next: metrics.py, the table of what there is to count; connector/stats.py, where it goes.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvbaton.runtime.metrics import OLDEST, PEERS, PINNED, WAITING, Metric, PeerState
from kvbaton.types import End

TELL_AGES_EVERY_S = 1.0
"""While something waits; everything else is told when it changes."""


@dataclass
class Wait:
    since_s: float
    num_blocks: int
    report_at_s: float


@dataclass
class Snapshot:
    """Since the last one, by `Metric.key`. Plain keys and values, so that it travels by any codec."""

    observed: dict[str, list[float]] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)


class Tally:
    def __init__(self, first_report_s: float = 5.0) -> None:
        """A wait is worth a line after `first_report_s`, then after 30 s, then whenever it has doubled."""
        self._lock = threading.Lock()
        self._first_report_s = first_report_s
        self._observed: defaultdict[str, list[float]] = defaultdict(list)
        self._counted: Counter[str] = Counter()
        # In the order in which they began: the first is the oldest.
        self._waits: dict[End, dict[str, Wait]] = {end: {} for end in End}
        self._peers = dict.fromkeys(PeerState, 0)
        self._has_changed = True
        self._told_s = 0.0
        # Before then no wait of that end is worth a line.
        self._quiet_until_s = dict.fromkeys(End, float("inf"))

    # -- the driver's thread -----------------------------------------------------------------------------------------

    def observe(self, metric: Metric, value: float) -> None:
        with self._lock:
            self._observed[metric.key()].append(value)

    def count(self, metric: Metric, *labels: enum.Enum) -> None:
        with self._lock:
            self._counted[metric.key(*labels)] += 1

    def wait_begins(self, end: End, key: str, num_blocks: int, now_s: float) -> None:
        """`key` waits from now on; of one that waits already, only the number of blocks is new."""
        with self._lock:
            wait = self._waits[end].setdefault(key, Wait(now_s, num_blocks, now_s + self._first_report_s))
            wait.num_blocks = num_blocks
            self._quiet_until_s[end] = min(self._quiet_until_s[end], wait.report_at_s)
            self._has_changed = True

    def wait_ends(self, end: End, key: str) -> None:
        """Idempotent."""
        with self._lock:
            if self._waits[end].pop(key, None) is not None:
                self._has_changed = True

    def long_waits(self, end: End, now_s: float) -> list[tuple[str, float]]:
        """The waits that are worth a line now, and how long they have lasted: each once per threshold."""
        if now_s < self._quiet_until_s[end]:
            return []
        with self._lock:
            due = [(key, wait) for key, wait in self._waits[end].items() if now_s >= wait.report_at_s]
            for _, wait in due:
                waited_s = now_s - wait.since_s
                wait.report_at_s = wait.since_s + (30.0 if waited_s < 30.0 else 2 * waited_s)
            self._quiet_until_s[end] = min(
                (wait.report_at_s for wait in self._waits[end].values()), default=float("inf")
            )
            return [(key, now_s - wait.since_s) for key, wait in due]

    def peers_are(self, counts: Mapping[PeerState, int]) -> None:
        with self._lock:
            if counts != self._peers:
                self._peers.update(counts)
                self._has_changed = True

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def take(self, now_s: float) -> Snapshot | None:
        """What is new since the last call; None when nothing is."""
        with self._lock:
            are_ages_due = now_s >= self._told_s + TELL_AGES_EVERY_S and any(self._waits.values())
            if not (self._has_changed or are_ages_due or self._observed or self._counted):
                return None
            gauges: dict[str, float] = {}
            if self._has_changed or are_ages_due:
                gauges, self._told_s, self._has_changed = self._gauges(now_s), now_s, False
            taken = Snapshot(dict(self._observed), dict(self._counted), gauges)
            self._observed.clear()
            self._counted.clear()
            return taken

    def _gauges(self, now_s: float) -> dict[str, float]:
        gauges = {PEERS.key(state): float(count) for state, count in self._peers.items()}
        for end, waits in self._waits.items():
            oldest = next(iter(waits.values()), None)
            gauges[PINNED.key(end)] = float(sum(wait.num_blocks for wait in waits.values()))
            gauges[WAITING.key(end)] = float(len(waits))
            gauges[OLDEST.key(end)] = 0.0 if oldest is None else round(now_s - oldest.since_s, 3)
        return gauges

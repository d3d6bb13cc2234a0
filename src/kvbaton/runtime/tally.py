"""What is counted, measured and waiting in this worker, for the engine's metrics.

The driver's thread adds; the engine's thread takes. Invariant: the lock guards a few dictionary operations and is never
held across I/O. Next: metrics.py, the table of what there is to count; connector/stats.py, where it goes.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from kvbaton.runtime.metrics import OLDEST, PEERS, PINNED, WAITING, Metric, PeerState
from kvbaton.types import End

TELL_AGES_EVERY_S = 1.0
"""While something waits; everything else is told when it changes."""


@dataclass
class Wait:
    since_s: float
    num_blocks: int | None
    """None where the engine does not wait: it may take no step that tells when the wait is over."""
    report_at_s: float


@dataclass
class _Peer:
    num_transfers: int
    is_connected: bool


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
        # By name, those with which transfers are open.
        self._peers: dict[End, dict[str, _Peer]] = {end: {} for end in End}
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

    def wait_begins(self, end: End, key: str, num_blocks: int | None, now_s: float) -> None:
        """`key` waits from now on; of one that waits already, only the number of blocks is new.

        None: a wait for the engine's own request. It is worth a line when it is long, but it is in no gauge.
        """
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

    def peer_opens(self, end: End, name: str, *, is_connected: bool) -> None:
        """One more transfer is open with it. Idle peers are not counted: nobody could tell an idle engine that one left."""
        with self._lock:
            peer = self._peers[end].setdefault(name, _Peer(0, is_connected))
            self._has_changed |= peer.num_transfers == 0 or peer.is_connected != is_connected
            peer.num_transfers += 1
            peer.is_connected = is_connected

    def peer_closes(self, end: End, name: str) -> None:
        """One of its transfers is over. To be said before the engine hears so: that step may be its last for long."""
        with self._lock:
            peer = self._peers[end][name]
            peer.num_transfers -= 1
            if peer.num_transfers == 0:
                del self._peers[end][name]
                self._has_changed = True

    def peer_connects(self, end: End, name: str) -> None:
        """Something came over the link. Idempotent."""
        with self._lock:
            peer = self._peers[end].get(name)
            if peer is not None and not peer.is_connected:
                peer.is_connected = self._has_changed = True

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
        gauges: dict[str, float] = {}
        for end, peers in self._peers.items():
            num_connected = sum(peer.is_connected for peer in peers.values())
            gauges[PEERS.key(end, PeerState.CONNECTING)] = float(len(peers) - num_connected)
            gauges[PEERS.key(end, PeerState.CONNECTED)] = float(num_connected)
        for end, waits in self._waits.items():
            counted = [(wait.since_s, wait.num_blocks) for wait in waits.values() if wait.num_blocks is not None]
            gauges[PINNED.key(end)] = float(sum(num_blocks for _, num_blocks in counted))
            gauges[WAITING.key(end)] = float(len(counted))
            gauges[OLDEST.key(end)] = round(now_s - counted[0][0], 3) if counted else 0.0
        return gauges

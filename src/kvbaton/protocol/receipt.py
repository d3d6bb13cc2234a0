"""What has arrived of one transfer, counted per producer rank and segment.

Segments may land in any order, so the highest one never implies the others. Invariant: complete means that for every
producer rank, segments 0 to its last are all in, all of one generation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbaton.errors import RemoteProtocolError


@dataclass
class _RankReceipt:
    seen: set[int] = field(default_factory=set)
    last: int | None = None

    @property
    def is_complete(self) -> bool:
        return self.last is not None and len(self.seen) == self.last + 1


class Receipt:
    """Collects arrivals of the newest generation; older ones are ignored, a newer one starts the count over."""

    def __init__(self, num_producer_ranks: int) -> None:
        self._num_producer_ranks = num_producer_ranks
        self._generation = 0
        self._ranks: dict[int, _RankReceipt] = {}

    def add(self, *, generation: int, producer_rank: int, segment: int, is_last: bool) -> bool:
        """Counts one arrival; False when it is a duplicate or of an older generation.

        Raises RemoteProtocolError for a rank that does not feed us, or a segment beyond or against the announced last.
        """
        if producer_rank >= self._num_producer_ranks:
            raise RemoteProtocolError(f"segment from rank {producer_rank}; {self._num_producer_ranks} ranks feed us")
        if generation < self._generation:
            return False
        if generation > self._generation:
            self._generation = generation
            self._ranks.clear()
        rank = self._ranks.setdefault(producer_rank, _RankReceipt())
        if segment in rank.seen:
            return False
        last = segment if is_last else rank.last
        if (is_last and rank.last is not None) or (last is not None and max(rank.seen | {segment}) > last):
            raise RemoteProtocolError(f"segment {segment} contradicts the last segment announced before, {rank.last}")
        rank.seen.add(segment)
        rank.last = last
        return True

    @property
    def is_complete(self) -> bool:
        return len(self._ranks) == self._num_producer_ranks and all(r.is_complete for r in self._ranks.values())

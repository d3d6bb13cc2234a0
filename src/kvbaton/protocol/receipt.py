"""What has arrived of one transfer from one prefill rank, counted per segment.

Segments may land in any order, so the highest one never implies the others. Invariant: complete means that segments 0 to
the last are all in, all of one generation.
"""

from __future__ import annotations

from kvbaton.errors import RemoteProtocolError


class Receipt:
    """Collects arrivals of the newest generation; older ones are ignored, a newer one starts the count over."""

    def __init__(self) -> None:
        self._generation = 0
        self._seen: set[int] = set()
        self._last: int | None = None

    def add(self, *, generation: int, segment: int, is_last: bool) -> bool:
        """Counts one arrival; False when it is a duplicate or of an older generation.

        Raises RemoteProtocolError for a segment beyond or against the announced last.
        """
        if generation < self._generation:
            return False
        if generation > self._generation:
            self._generation, self._seen, self._last = generation, set(), None
        if segment in self._seen:
            return False
        last = segment if is_last else self._last
        if (is_last and self._last is not None) or (last is not None and max(self._seen | {segment}) > last):
            raise RemoteProtocolError(f"segment {segment} contradicts the last segment announced before, {self._last}")
        self._seen.add(segment)
        self._last = last
        return True

    @property
    def num_segments(self) -> int:
        return len(self._seen)

    @property
    def is_complete(self) -> bool:
        return self._last is not None and len(self._seen) == self._last + 1

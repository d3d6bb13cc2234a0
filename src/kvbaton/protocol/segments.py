"""What the poster of a transfer has to send next. Counting only: tokens, segments, generations.

A segment is a run of whole blocks that became final together; the last one also carries the prompt's unfinished block.
Invariant: within a generation every wanted token is in exactly one segment, and exactly one segment is the last.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """Tokens [first_token, end_token); empty when the last step added nothing the destination lacks."""

    generation: int
    number: int
    first_token: int
    end_token: int
    is_last: bool


class Segments:
    """The source's frontier against what has been posted and confirmed, for a destination that wants `first_token` on.

    `alignment_tokens` is a multiple of every cache group's block size on both sides, so that no block is split between
    segments. `max_tokens` bounds one segment, so that a long prompt that was there all along still shows progress.
    """

    def __init__(self, first_token: int, alignment_tokens: int, max_tokens: int | None = None) -> None:
        self._first_token = first_token
        self._alignment_tokens = alignment_tokens
        self._max_tokens = None if max_tokens is None else max(max_tokens, alignment_tokens)
        self._restart(0)

    def _restart(self, generation: int) -> None:
        self.generation = generation
        self._num_final_tokens = 0
        self._is_final = False
        self._posted_to_token = self._first_token
        self._num_posted = 0
        self._last_is_posted = False
        self.num_in_flight = 0

    def advance(self, num_final_tokens: int, *, is_final: bool, generation: int) -> None:
        """Tokens [0, num_final_tokens) hold final KV at the source. A newer generation starts over; an older is ignored."""
        if generation > self.generation:
            self._restart(generation)
        if generation == self.generation:
            self._num_final_tokens = max(self._num_final_tokens, num_final_tokens)
            self._is_final = self._is_final or is_final

    def take(self) -> Segment | None:
        """The next segment to post, or None. Taking it counts it as in flight."""
        if self._last_is_posted:
            return None
        end_token, is_last = self._num_final_tokens, self._is_final
        if self._max_tokens is not None and end_token > self._posted_to_token + self._max_tokens:
            end_token, is_last = self._posted_to_token + self._max_tokens, False
        if not is_last:
            end_token -= end_token % self._alignment_tokens
            if end_token <= self._posted_to_token:
                return None
        segment = Segment(
            generation=self.generation,
            number=self._num_posted,
            first_token=self._posted_to_token,
            end_token=max(end_token, self._posted_to_token),
            is_last=is_last,
        )
        self._posted_to_token = segment.end_token
        self._num_posted += 1
        self._last_is_posted = segment.is_last
        self.num_in_flight += 1
        return segment

    def confirm(self, segment: Segment) -> None:
        """The transport is done with `segment`, well or badly."""
        if segment.generation == self.generation:
            self.num_in_flight -= 1

    @property
    def num_posted(self) -> int:
        """Of this generation."""
        return self._num_posted

    @property
    def is_complete(self) -> bool:
        """Everything was posted and nothing is in flight."""
        return self._last_is_posted and self.num_in_flight == 0

"""What the poster sends next."""

from __future__ import annotations

from kvbaton.protocol.segments import Segment, Segments


def taken(segments: Segments) -> list[tuple[int, int, int, bool]]:
    """(number, first token, end token, is last) of everything that can be taken now."""
    found = []
    while (segment := segments.take()) is not None:
        found.append((segment.number, segment.first_token, segment.end_token, segment.is_last))
    return found


def test_a_prompt_computed_at_once_is_one_segment() -> None:
    segments = Segments(first_token=0, alignment_tokens=16)
    segments.advance(40, is_final=True, generation=0)
    assert taken(segments) == [(0, 0, 40, True)]


def test_an_unfinished_block_waits_for_the_last_segment() -> None:
    segments = Segments(first_token=0, alignment_tokens=16)
    segments.advance(40, is_final=False, generation=0)
    assert taken(segments) == [(0, 0, 32, False)]
    segments.advance(47, is_final=False, generation=0)
    assert taken(segments) == []
    segments.advance(50, is_final=True, generation=0)
    assert taken(segments) == [(1, 32, 50, True)]


def test_what_the_destination_holds_is_not_sent() -> None:
    segments = Segments(first_token=32, alignment_tokens=16)
    segments.advance(32, is_final=False, generation=0)
    assert taken(segments) == []
    segments.advance(64, is_final=False, generation=0)
    assert taken(segments) == [(0, 32, 64, False)]


def test_a_last_step_that_adds_nothing_is_an_empty_last_segment() -> None:
    segments = Segments(first_token=0, alignment_tokens=16)
    segments.advance(32, is_final=False, generation=0)
    assert taken(segments) == [(0, 0, 32, False)]
    segments.advance(32, is_final=True, generation=0)
    assert taken(segments) == [(1, 32, 32, True)]


def test_a_destination_that_holds_more_than_the_prompt_gets_an_empty_last_segment() -> None:
    segments = Segments(first_token=48, alignment_tokens=16)
    segments.advance(40, is_final=True, generation=0)
    assert taken(segments) == [(0, 48, 48, True)]


def test_complete_means_posted_and_confirmed() -> None:
    segments = Segments(first_token=0, alignment_tokens=16)
    assert not segments.is_complete
    segments.advance(16, is_final=True, generation=0)
    segment = segments.take()
    assert segment == Segment(generation=0, number=0, first_token=0, end_token=16, is_last=True)
    assert not segments.is_complete
    segments.confirm(segment)
    assert segments.is_complete


def test_a_newer_generation_sends_everything_again() -> None:
    segments = Segments(first_token=16, alignment_tokens=16)
    segments.advance(48, is_final=False, generation=0)
    old = segments.take()
    assert old is not None
    segments.advance(32, is_final=False, generation=2)
    segments.confirm(old)  # of the generation before: not counted
    assert (segments.generation, segments.num_in_flight) == (2, 0)
    assert taken(segments) == [(0, 16, 32, False)]


def test_an_older_generation_is_ignored() -> None:
    segments = Segments(first_token=0, alignment_tokens=16)
    segments.advance(16, is_final=False, generation=1)
    segments.advance(64, is_final=True, generation=0)
    assert taken(segments) == [(0, 0, 16, False)]


def test_a_long_prompt_that_is_all_there_goes_in_bounded_segments() -> None:
    segments = Segments(first_token=16, alignment_tokens=16, max_tokens=40)
    segments.advance(100, is_final=True, generation=0)
    assert taken(segments) == [(0, 16, 48, False), (1, 48, 80, False), (2, 80, 100, True)]


def test_a_bound_below_one_block_means_one_block() -> None:
    segments = Segments(first_token=0, alignment_tokens=16, max_tokens=1)
    segments.advance(32, is_final=False, generation=0)
    assert taken(segments) == [(0, 0, 16, False), (1, 16, 32, False)]
    segments.advance(33, is_final=True, generation=0)
    assert taken(segments) == [(2, 32, 33, True)]

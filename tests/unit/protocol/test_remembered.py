"""How transfers ended is told for a while, and forgotten after it; the memory is bounded either way."""

from __future__ import annotations

from kvbaton.protocol.remembered import Remembered
from kvbaton.types import Outcome, TransferId

A, B, C = TransferId("a"), TransferId("b"), TransferId("c")


def test_an_outcome_is_told_until_its_time_is_over() -> None:
    remembered = Remembered(keep_s=10.0)
    remembered.add(A, Outcome.EXPIRED, "why", now_s=5.0)
    memory = remembered.recall(A, now_s=14.9)
    assert memory is not None
    assert (memory.outcome, memory.reason) == (Outcome.EXPIRED, "why")
    assert remembered.recall(A, now_s=15.0) is None
    assert remembered.recall(B, now_s=5.0) is None


def test_the_oldest_goes_when_there_are_too_many() -> None:
    remembered = Remembered(max_entries=2)
    for transfer_id in (A, B, A, C):  # said again, A is the younger of the two
        remembered.add(transfer_id, Outcome.FAILED, "", now_s=0.0)
    assert [remembered.recall(each, 1.0) is not None for each in (A, B, C)] == [True, False, True]


def test_the_last_word_counts() -> None:
    remembered = Remembered()
    remembered.add(A, Outcome.CANCELLED, "first", now_s=0.0)
    remembered.add(A, Outcome.FAILED, "second", now_s=1.0)
    memory = remembered.recall(A, now_s=2.0)
    assert memory is not None
    assert memory.reason == "second"

"""When everything has arrived: counted per segment, of one generation, in any order."""

from __future__ import annotations

import pytest

from kvbaton.errors import RemoteProtocolError
from kvbaton.protocol.receipt import Receipt


def add(receipt: Receipt, segment: int, *, last: bool = False, generation: int = 0) -> bool:
    return receipt.add(generation=generation, segment=segment, is_last=last)


def test_the_last_segment_does_not_imply_the_others() -> None:
    receipt = Receipt()
    assert add(receipt, 2, last=True)
    assert add(receipt, 0)
    assert not receipt.is_complete
    assert add(receipt, 1)
    assert receipt.is_complete


def test_nothing_is_complete_at_first() -> None:
    assert not Receipt().is_complete


def test_a_duplicate_counts_once() -> None:
    receipt = Receipt()
    assert add(receipt, 0)
    assert not add(receipt, 0)
    assert add(receipt, 1, last=True)
    assert not add(receipt, 1, last=True)
    assert receipt.is_complete


def test_a_newer_generation_starts_the_count_over() -> None:
    receipt = Receipt()
    add(receipt, 0, last=True)
    assert add(receipt, 0, generation=1)
    assert not receipt.is_complete
    assert not add(receipt, 1, last=True, generation=0)
    assert not receipt.is_complete
    assert add(receipt, 1, last=True, generation=1)
    assert receipt.is_complete


@pytest.mark.parametrize("arrivals", [[(2, True), (3, False)], [(3, False), (2, True)], [(1, True), (2, True)]])
def test_a_segment_against_the_announced_last_is_refused(arrivals: list[tuple[int, bool]]) -> None:
    receipt = Receipt()
    add(receipt, arrivals[0][0], last=arrivals[0][1])
    with pytest.raises(RemoteProtocolError, match="contradicts"):
        add(receipt, arrivals[1][0], last=arrivals[1][1])


def test_a_refused_segment_leaves_the_count_as_it_was() -> None:
    receipt = Receipt()
    add(receipt, 1, last=True)
    with pytest.raises(RemoteProtocolError):
        add(receipt, 2)
    add(receipt, 0)
    assert receipt.is_complete

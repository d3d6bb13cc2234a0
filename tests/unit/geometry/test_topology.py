"""Which ranks feed which, by hand; the property test says that it always adds up."""

from __future__ import annotations

import pytest

from kvbaton.errors import Incompatible
from kvbaton.geometry.heads import owned_heads
from kvbaton.geometry.layout import KVLayout
from kvbaton.geometry.topology import heads_between, num_readers, producers_of, unread_by_all
from tests.unit.geometry.layouts import layout, region


def of(tp_size: int, tp_rank: int = 0, *, total: int = 8) -> KVLayout:
    heads = max(1, total // tp_size)
    return layout(region(total_heads=total, num_heads=heads, head_stride_bytes=4), tp_size=tp_size, tp_rank=tp_rank)


@pytest.mark.parametrize(
    ("total", "size", "rank", "expected"),
    [(8, 1, 0, range(8)), (8, 4, 3, range(6, 8)), (2, 4, 1, range(1)), (2, 4, 2, range(1, 2)), (1, 8, 7, range(1))],
)
def test_owned_heads(total: int, size: int, rank: int, expected: range) -> None:
    assert owned_heads(total, size, rank) == expected


@pytest.mark.parametrize(("total", "size"), [(8, 3), (3, 2), (2, 3)])
def test_heads_that_cannot_be_spread_are_refused(total: int, size: int) -> None:
    with pytest.raises(Incompatible, match=f"{total} KV heads cannot be spread over {size}"):
        owned_heads(total, size, 0)


def test_a_large_prefill_engine_feeds_a_small_decode_engine() -> None:
    assert producers_of(of(2, 1), 8, 1) == (4, 5, 6, 7)
    assert num_readers(of(2, 1), 8, 5) == 1


def test_a_small_prefill_engine_feeds_a_large_decode_engine() -> None:
    assert producers_of(of(8, 5), 2, 1) == (1,)
    assert num_readers(of(8, 5), 2, 1) == 4


def test_every_stage_feeds() -> None:
    assert producers_of(of(1), 2, 3) == (0, 1, 2, 3, 4, 5)
    assert num_readers(of(1), 2, 5) == 1


def test_of_copies_every_decode_rank_takes_one_and_the_load_is_spread() -> None:
    assert [producers_of(of(4, rank, total=1), 2, 1) for rank in range(4)] == [(0,), (1,), (0,), (1,)]
    assert heads_between(2, 4, 1, 1, 0) == range(0)
    assert heads_between(2, 4, 0, 1, 0) == range(1)


def test_copies_that_nobody_takes_are_known() -> None:
    assert unread_by_all(of(1, total=2), 4, 2) == (1, 3, 5, 7)
    assert unread_by_all(of(4, total=1), 2, 1) == ()


def test_a_ticket_of_absurd_sizes_costs_nothing() -> None:
    """Found: sizes come from a request's params; a loop over their product would have stopped the transfer thread."""
    for absurd in (producers_of, unread_by_all):
        with pytest.raises(Incompatible, match="1 to 4096 are supported"):
            absurd(of(1), 4096, 4096)
        with pytest.raises(Incompatible, match="0 x 1 ranks"):
            absurd(of(1), 0, 1)

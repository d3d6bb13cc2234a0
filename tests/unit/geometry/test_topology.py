"""Who feeds whom, worked out by hand. tests/property/test_topology.py has the rules for all sizes."""

from __future__ import annotations

import pytest

from kvbaton.errors import Incompatible
from kvbaton.geometry.layout import MAX_RANKS, KVLayout
from kvbaton.geometry.topology import heads_between, num_readers, producers_of, unread_by_all
from tests.unit.geometry.layouts import layout, region


def decode_rank(tp_size: int, tp_rank: int, *total_heads: int) -> KVLayout:
    regions = [region(f"layer.{number}", total_heads=total) for number, total in enumerate(total_heads)]
    return layout(*regions, tp_size=tp_size, tp_rank=tp_rank)


@pytest.mark.parametrize(
    ("decode", "prefill_tp_size", "expected"),
    [
        (decode_rank(1, 0, 8), 1, (0,)),
        (decode_rank(1, 0, 8), 4, (0, 1, 2, 3)),
        (decode_rank(4, 2, 8), 2, (1,)),
        (decode_rank(2, 1, 2), 8, (5,)),  # head 1 is on ranks 4 to 7; rank 1 takes copy 1
        (decode_rank(1, 0, 2), 8, (0, 4)),
        (decode_rank(8, 3, 2), 4, (1,)),  # head 0 is on ranks 0 and 1
        (decode_rank(8, 6, 1), 4, (2,)),  # a latent cache: every rank has it
        (decode_rank(4, 3, 4, 1), 2, (1,)),
        (decode_rank(4, 2, 4, 1), 2, (0, 1)),  # heads from one rank, the latent layer from another
    ],
)
def test_a_decode_rank_is_fed_by(decode: KVLayout, prefill_tp_size: int, expected: tuple[int, ...]) -> None:
    assert producers_of(decode, prefill_tp_size, 1) == expected


def test_every_stage_feeds_its_layers() -> None:
    assert producers_of(decode_rank(1, 0, 2), 2, 3) == (0, 1, 2, 3, 4, 5)
    assert producers_of(decode_rank(2, 1, 2), 2, 3) == (1, 3, 5)


def test_a_prefill_rank_counts_its_readers_in_every_stage() -> None:
    decode = decode_rank(4, 0, 2)
    assert [num_readers(decode, 2, 2, rank) for rank in range(4)] == [2, 2, 2, 2]
    assert [num_readers(decode, 1, 1, rank) for rank in range(1)] == [4]


def test_copies_that_nobody_reads_are_known() -> None:
    assert unread_by_all(decode_rank(1, 0, 1), 4, 2) == (1, 2, 3, 5, 6, 7)
    assert unread_by_all(decode_rank(4, 2, 1), 4, 1) == ()
    assert [num_readers(decode_rank(1, 0, 1), 4, 1, rank) for rank in range(4)] == [1, 0, 0, 0]


def test_the_heads_of_a_copy_go_only_to_whom_that_copy_serves() -> None:
    assert heads_between(2, 4, 0, 1, 0) == range(1)
    assert heads_between(2, 4, 1, 1, 0) == range(0)
    assert heads_between(2, 4, 2, 1, 0) == range(1, 2)
    assert heads_between(8, 2, 0, 2, 1) == range(0)


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (MAX_RANKS + 1, 1), (2, MAX_RANKS), (1 << 62, 1 << 62)])
def test_sizes_that_no_engine_has_are_refused_before_anything_is_counted(sizes: tuple[int, int]) -> None:
    decode = decode_rank(1, 0, 1)
    named = f"tensor-parallel size {sizes[0]} and pipeline-parallel size {sizes[1]}"
    with pytest.raises(Incompatible, match=named):
        producers_of(decode, *sizes)
    with pytest.raises(Incompatible, match=named):
        unread_by_all(decode, *sizes)
    with pytest.raises(Incompatible, match=named):
        num_readers(decode, sizes[0], sizes[1], 0)


def test_heads_that_do_not_divide_over_the_prefill_ranks_are_refused() -> None:
    with pytest.raises(Incompatible, match="4 KV heads cannot be divided over tensor-parallel size 3"):
        producers_of(decode_rank(2, 0, 4), 3, 1)

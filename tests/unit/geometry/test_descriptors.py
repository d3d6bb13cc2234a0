"""Block ids -> address arrays: what is merged, what is refused, where a block range ends."""

from __future__ import annotations

import pytest

from kvbaton.errors import RemoteProtocolError
from kvbaton.geometry.descriptors import Descriptors, block_range, describe
from kvbaton.geometry.layout import Region
from kvbaton.geometry.mapping import PeerMapping, map_layouts
from tests.unit.geometry.layouts import layout, region


def rows(descriptors: Descriptors) -> list[tuple[int, int, int]]:
    """(our address, their address, length), sorted."""
    columns = (descriptors.our_address, descriptors.their_address, descriptors.length_bytes)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def mapping(ours: tuple[Region, ...] = (), theirs: tuple[Region, ...] = ()) -> PeerMapping:
    """Ours at 10000, theirs at 50000, ten blocks of ten bytes, unless told otherwise."""
    plain = {"block_stride_bytes": 10, "block_bytes": 10, "num_blocks": 10}
    our = ours or (region("a", base_address=10000, **plain),)
    their = theirs or (region("a", base_address=50000, **plain),)
    sizes = (16,) * (1 + max(each.cache_group for each in our))
    return map_layouts(layout(*our, block_size_tokens=sizes), layout(*their, block_size_tokens=sizes))


@pytest.mark.parametrize(
    ("first", "end", "whole", "expected"),
    [
        (0, 16, False, range(1)),
        (0, 17, False, range(2)),
        (0, 15, False, range(1)),
        (0, 0, False, range(0)),
        (16, 48, False, range(1, 3)),
        (16, 49, True, range(1, 3)),
        (16, 31, True, range(1, 1)),
        (32, 20, False, range(2, 2)),
        (20, 32, False, range(1, 2)),  # a first token inside a block takes the block whole
    ],
)
def test_block_range(first: int, end: int, whole: bool, expected: range) -> None:
    assert block_range(first, end, 16, whole_blocks_only=whole) == expected


def test_blocks_that_go_up_together_become_one_descriptor() -> None:
    assert rows(describe(mapping(), [[2, 3, 4]], [[7, 8, 9]])) == [(10020, 50070, 30)]


def test_blocks_that_go_down_together_become_one_descriptor_from_the_lowest() -> None:
    assert rows(describe(mapping(), [[4, 3, 2]], [[9, 8, 7]])) == [(10020, 50070, 30)]


def test_blocks_that_go_opposite_ways_stay_apart() -> None:
    assert rows(describe(mapping(), [[2, 3]], [[8, 7]])) == [(10020, 50080, 10), (10030, 50070, 10)]


def test_the_example_in_the_source() -> None:
    found = rows(describe(mapping(), [[5, 6, 7, 9, 8]], [[1, 2, 3, 7, 6]]))
    assert found == [(10050, 50010, 30), (10080, 50060, 20)]


def test_a_run_that_turns_back_on_a_repeated_id_covers_what_it_names() -> None:
    found = rows(describe(mapping(), [[5, 6, 5, 4]], [[1, 2, 1, 0]]))
    assert found == [(10050, 50010, 10), (10050, 50010, 20)]  # block 0 of theirs is null


def test_the_null_block_of_either_side_moves_nothing() -> None:
    assert rows(describe(mapping(), [[0, 3, 4]], [[5, 0, 7]])) == [(10040, 50070, 10)]


def test_nothing_to_move_is_no_descriptor() -> None:
    nothing = describe(mapping(), [[]], [[]])
    assert (nothing.num_descriptors, nothing.num_bytes) == (0, 0)
    assert describe(mapping(), [[0]], [[3]]).num_descriptors == 0


def test_padding_between_blocks_on_one_side_forbids_merging() -> None:
    padded = (region("a", base_address=50000, block_stride_bytes=16, block_bytes=10, num_blocks=10),)
    found = describe(mapping(theirs=padded), [[2, 3]], [[7, 8]])
    assert rows(found) == [(10020, 50112, 10), (10030, 50128, 10)]
    assert (found.num_descriptors, found.num_bytes) == (2, 20)


def test_regions_of_one_group_merge_each_by_its_own_stride() -> None:
    ours = (
        region("dense", base_address=10000, block_stride_bytes=10, block_bytes=10, num_blocks=10),
        region("padded", base_address=20000, block_stride_bytes=16, block_bytes=10, num_blocks=10),
    )
    assert rows(describe(mapping(ours, ours), [[1, 2]], [[4, 5]])) == [
        (10010, 10040, 20),
        (20016, 20064, 10),
        (20032, 20080, 10),
    ]


def test_every_cache_group_has_its_own_blocks() -> None:
    plain = {"block_stride_bytes": 10, "block_bytes": 10, "num_blocks": 10}
    both = (region("a", base_address=10000, **plain), region("b", cache_group=1, base_address=20000, **plain))
    assert rows(describe(mapping(both, both), [[1], [2]], [[3], [4]])) == [(10010, 10030, 10), (20020, 20040, 10)]


@pytest.mark.parametrize(
    ("ours", "theirs", "named"),
    [
        ([[1]], [[1], [1]], "1 and 2 cache groups; expected 1"),
        ([], [], "0 and 0 cache groups; expected 1"),
        ([[1, 2]], [[1]], "2 blocks here cannot pair with 1"),
        ([[10]], [[1]], "our block ids span 10 to 10; the registered cache has 10"),
        ([[1]], [[10]], "the peer's block ids span 10 to 10; the registered cache has 10"),
        ([[1]], [[-1]], "the peer's block ids span -1 to -1"),
    ],
)
def test_lists_that_cannot_be_are_refused(ours: list[list[int]], theirs: list[list[int]], named: str) -> None:
    with pytest.raises(RemoteProtocolError, match=named):
        describe(mapping(), ours, theirs)


def test_blocks_of_a_group_without_regions_are_refused() -> None:
    empty = map_layouts(*[layout(block_size_tokens=(16, 16))] * 2)
    with pytest.raises(RemoteProtocolError, match="the registered cache has 0 blocks"):
        describe(empty, [[], [1]], [[], [1]])

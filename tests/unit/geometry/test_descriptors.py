"""Block ids -> address arrays: what is merged, what is refused, what a window leaves out."""

from __future__ import annotations

import pytest

from kvbaton.errors import RemoteProtocolError
from kvbaton.geometry.descriptors import Descriptors, describe
from kvbaton.geometry.layout import Region
from kvbaton.geometry.mapping import PeerMapping, map_layouts
from kvbaton.types import End
from tests.unit.geometry.layouts import layout, region

Lists = list[list[int]]


def plain(layer: str = "a", **changed: int) -> Region:
    """Ten rows of ten tokens of one byte."""
    values = {
        "num_rows": 10,
        "row_stride_bytes": 10,
        "row_tokens": 10,
        "num_heads": 1,
        "total_heads": 1,
        "head_stride_bytes": 10,
        "token_stride_bytes": 1,
        "content_bytes": 1,
    }
    return region(layer, **(values | changed))


def mapping(
    ours: tuple[Region, ...] = (),
    theirs: tuple[Region, ...] = (),
    *,
    our_end: End = End.SOURCE,
    our_block: int = 10,
    their_block: int = 10,
    window: int = 0,
) -> PeerMapping:
    """Ours at 10000, theirs at 50000, ten blocks of ten bytes, unless told otherwise."""
    our, their = ours or (plain(base_address=10000),), theirs or (plain(base_address=50000),)
    num_groups = 1 + max(each.cache_group for each in our)

    def side(block: int) -> dict[str, object]:
        return {"block_size_tokens": (block,) * num_groups, "window_tokens": (window,) * num_groups}

    return map_layouts(layout(*our, **side(our_block)), layout(*their, **side(their_block)), our_end)


def whole(mapped: PeerMapping, ours: Lists, theirs: Lists, num_tokens: int | None = None) -> Descriptors:
    """All tokens of the prompt, or of as many blocks as are listed."""
    end = len(ours[0]) * 10 if num_tokens is None else num_tokens
    return describe(mapped, ours, theirs, first_token=0, end_token=end, num_tokens=end)


def rows(descriptors: Descriptors) -> list[tuple[int, int, int]]:
    """(our address, their address, length), sorted."""
    columns = (descriptors.our_address, descriptors.their_address, descriptors.length_bytes)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def test_blocks_that_go_up_together_become_one_descriptor() -> None:
    assert rows(whole(mapping(), [[2, 3, 4]], [[7, 8, 9]])) == [(10020, 50070, 30)]


def test_blocks_that_go_down_together_become_one_descriptor_from_the_lowest() -> None:
    assert rows(whole(mapping(), [[4, 3, 2]], [[9, 8, 7]])) == [(10020, 50070, 30)]


def test_blocks_in_any_order_that_both_sides_share_become_one_descriptor() -> None:
    assert rows(whole(mapping(), [[3, 2, 4]], [[8, 7, 9]])) == [(10020, 50070, 30)]


def test_blocks_that_go_opposite_ways_stay_apart() -> None:
    assert rows(whole(mapping(), [[2, 3]], [[8, 7]])) == [(10020, 50080, 10), (10030, 50070, 10)]


def test_a_repeated_id_is_described_as_often_as_it_is_named() -> None:
    assert rows(whole(mapping(), [[5, 6, 5]], [[1, 2, 1]])) == [(10050, 50010, 10), (10050, 50010, 20)]


def test_padding_between_rows_on_one_side_forbids_merging() -> None:
    padded = (plain(base_address=50000, row_stride_bytes=16),)
    found = whole(mapping(theirs=padded), [[2, 3]], [[7, 8]])
    assert rows(found) == [(10020, 50112, 10), (10030, 50128, 10)]
    assert (found.num_descriptors, found.num_bytes) == (2, 20)


def test_every_cache_group_has_its_own_blocks() -> None:
    both = (plain("a", base_address=10000), plain("b", cache_group=1, base_address=20000))
    assert rows(whole(mapping(both, both), [[1], [2]], [[3], [4]])) == [(10010, 10030, 10), (20020, 20040, 10)]


def test_a_small_block_goes_into_its_part_of_a_large_one() -> None:
    large = (plain(base_address=50000, row_tokens=20, row_stride_bytes=20, num_rows=5),)
    assert rows(whole(mapping(theirs=large, their_block=20), [[7, 3, 4]], [[2, 1]], 30)) == [
        (10030, 50050, 10),
        (10040, 50020, 10),
        (10070, 50040, 10),
    ]


def test_rows_of_one_block_follow_each_other() -> None:
    """Two kernel blocks of 10 make a block of 20 here; the peer's block of 20 is one row."""
    one_row = (plain(base_address=50000, row_tokens=20, row_stride_bytes=20, num_rows=5),)
    found = whole(mapping(theirs=one_row, our_block=20, their_block=20), [[3, 1]], [[1, 4]], 40)
    assert rows(found) == [(10020, 50080, 20), (10060, 50020, 20)]


def test_heads_that_lie_apart_on_one_side_are_a_piece_each() -> None:
    """Token-major here, head-major there: two heads x two tokens of one byte."""
    shape = {"num_heads": 2, "total_heads": 2, "row_tokens": 2, "row_stride_bytes": 4}
    ours = (plain("a", base_address=10000, head_stride_bytes=1, token_stride_bytes=2, **shape),)
    theirs = (plain("a", base_address=50000, head_stride_bytes=2, token_stride_bytes=1, **shape),)
    mapped = mapping(ours, theirs, our_block=2, their_block=2)
    assert rows(whole(mapped, [[1]], [[2]], 2)) == [
        (10004, 50008, 1),
        (10005, 50010, 1),
        (10006, 50009, 1),
        (10007, 50011, 1),
    ]


def test_the_range_is_rounded_outwards_to_chunks() -> None:
    """Chunks of 10: tokens 15 to 24 touch those of tokens 10 to 29."""
    found = describe(mapping(), [[1, 2, 3]], [[4, 5, 6]], first_token=15, end_token=25, num_tokens=25)
    assert rows(found) == [(10020, 50050, 20)]


@pytest.mark.parametrize(("first", "end"), [(0, 0), (15, 15), (30, 20)])
def test_no_tokens_are_no_descriptor(first: int, end: int) -> None:
    nothing = describe(mapping(), [[1, 2, 3]], [[4, 5, 6]], first_token=first, end_token=end, num_tokens=30)
    assert (nothing.num_descriptors, nothing.num_bytes) == (0, 0)


@pytest.mark.parametrize("our_end", End)
def test_the_destinations_null_block_receives_nothing(our_end: End) -> None:
    ours, theirs = ([[2, 3, 4]], [[0, 6, 7]]) if our_end is End.SOURCE else ([[0, 3, 4]], [[5, 6, 7]])
    assert rows(whole(mapping(our_end=our_end), ours, theirs)) == [(10030, 50060, 20)]
    assert whole(mapping(our_end=our_end), *([[0]], [[0]])).num_descriptors == 0


@pytest.mark.parametrize("our_end", End)
def test_a_source_that_let_go_of_a_block_that_is_needed_is_told_which_token(our_end: End) -> None:
    ours, theirs = ([[2, 0, 4]], [[5, 6, 7]]) if our_end is End.SOURCE else ([[5, 6, 7]], [[2, 0, 4]])
    with pytest.raises(RemoteProtocolError, match="block for token 10 in our cache group 0 is gone"):
        whole(mapping(our_end=our_end), ours, theirs)


@pytest.mark.parametrize(("num_tokens", "is_needed"), [(22, True), (23, False), (30, False)])
def test_a_window_leaves_out_the_blocks_that_it_has_passed(num_tokens: int, is_needed: bool) -> None:
    """Window 13: a prompt of 22 tokens still needs token 9, one of 23 does not. The source has let go of tokens 0 to 9."""
    mapped = mapping(window=13)
    if is_needed:
        with pytest.raises(RemoteProtocolError, match="token 0"):
            whole(mapped, [[0, 2, 3]], [[5, 6, 7]], num_tokens)
    else:
        assert rows(whole(mapped, [[0, 2, 3]], [[5, 6, 7]], num_tokens)) == [(10020, 50060, 20)]


def test_a_destination_block_that_the_window_touches_is_filled_whole_or_not_at_all() -> None:
    """Found in review: half-filled, it stays in decode's prefix cache, and a shorter prompt would read the other half."""
    large = (plain(base_address=50000, row_tokens=20, row_stride_bytes=20, num_rows=5),)
    mapped = mapping(theirs=large, their_block=20, window=13)  # token 12 on, of a prompt of 25
    with pytest.raises(RemoteProtocolError, match="token 0"):
        whole(mapped, [[0, 2, 3]], [[1, 2]], 25)


def test_a_destination_block_that_the_window_has_passed_stays_as_it_is() -> None:
    large = (plain(base_address=50000, row_tokens=20, row_stride_bytes=20, num_rows=5),)
    mapped = mapping(theirs=large, their_block=20, window=3)  # token 42 on, of a prompt of 45
    assert rows(whole(mapped, [[0, 0, 0, 0, 5]], [[1, 2, 3]], 45)) == [(10050, 50060, 10)]


def test_a_prompt_longer_than_any_number_of_tokens_is_no_overflow() -> None:
    found = describe(mapping(window=5), [[0, 2]], [[3, 4]], first_token=0, end_token=20, num_tokens=(1 << 64) - 1)
    assert rows(found) == [(10020, 50040, 10)]


@pytest.mark.parametrize(
    ("ours", "theirs", "named"),
    [
        ([[1]], [[1], [1]], "1 cache groups here and 2 at the peer; expected 1 and 1"),
        ([], [], "0 cache groups here and 0 at the peer; expected 1 and 1"),
        ([[1, 2]], [[1]], r"the peer's 1 blocks of 10 tokens cannot hold token 19 \(cache group 0\)"),
        ([[1]], [[1, 2]], "our 1 blocks of 10 tokens cannot hold token 19"),
        ([[10, 1]], [[1, 2]], "our block ids span 1 to 10; the registered cache has 10"),
        ([[1, 2]], [[10, 11]], "the peer's block ids span 10 to 11; the registered cache has 10"),
        ([[1, 2]], [[-1, 1]], "the peer's block ids span -1 to 1"),
    ],
)
def test_lists_that_cannot_be_are_refused(ours: Lists, theirs: Lists, named: str) -> None:
    with pytest.raises(RemoteProtocolError, match=named):
        describe(mapping(), ours, theirs, first_token=0, end_token=20, num_tokens=20)


def test_only_the_blocks_of_the_range_are_looked_at() -> None:
    """A stream's later segments do not depend on blocks that were given back since."""
    found = describe(mapping(), [[99, 2]], [[-5, 4]], first_token=10, end_token=20, num_tokens=20)
    assert rows(found) == [(10020, 50040, 10)]

"""Block ids -> address arrays: what is joined, what is refused, what is left out."""

from __future__ import annotations

import pytest

from kvbaton.errors import Incompatible, RemoteProtocolError
from kvbaton.geometry.descriptors import Descriptors, alignment_tokens, describe
from kvbaton.geometry.layout import KVLayout, Region, plain
from kvbaton.geometry.mapping import PeerMapping, map_layouts
from kvbaton.types import End
from tests.unit.geometry.layouts import layout, region

Rows = list[tuple[int, int, int]]


def rows(descriptors: Descriptors) -> Rows:
    """(our address, their address, length), sorted."""
    columns = (descriptors.our_address, descriptors.their_address, descriptors.length_bytes)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def dense(layer: str = "a", base: int = 10000, *, tokens: int = 4, stride: int = 0, **changed: object) -> Region:
    """Ten blocks; one head, a byte per token."""
    one = {"num_heads": 1, "total_heads": 1, "head_stride_bytes": 99, "parts": plain(1, 1)}
    shape = {"row_tokens": tokens, "row_stride_bytes": stride or tokens, "num_rows": 10, "base_address": base}
    return region(layer, **(one | shape | changed))


def of(*regions: Region, block: int = 4, window: int = 0) -> KVLayout:
    num_groups = 1 + max(each.cache_group for each in regions)
    return layout(*regions, block_size_tokens=(block,) * num_groups, window_tokens=(window,) * num_groups)


def pair(ours: KVLayout | None = None, theirs: KVLayout | None = None, end: End = End.SOURCE) -> PeerMapping:
    return map_layouts(ours or of(dense()), theirs or of(dense(base=50000)), end)


def whole(mapping: PeerMapping, ours: list[list[int]], theirs: list[list[int]], num_tokens: int) -> Rows:
    return rows(describe(mapping, ours, theirs, first_token=0, end_token=num_tokens, num_tokens=num_tokens))


def test_blocks_that_go_up_together_become_one_descriptor() -> None:
    assert whole(pair(), [[2, 3, 4]], [[7, 8, 9]], 12) == [(10008, 50028, 12)]


def test_blocks_that_go_down_together_become_one_descriptor_from_the_lowest() -> None:
    """The last block, which the prompt leaves unfinished, is moved whole."""
    assert whole(pair(), [[4, 3, 2]], [[9, 8, 7]], 11) == [(10008, 50028, 12)]


def test_blocks_that_go_opposite_ways_stay_apart() -> None:
    assert whole(pair(), [[2, 3]], [[8, 7]], 8) == [(10008, 50032, 4), (10012, 50028, 4)]


def test_only_the_tokens_asked_for_are_moved() -> None:
    found = describe(pair(), [[2, 3, 5]], [[7, 8, 9]], first_token=4, end_token=8, num_tokens=12)
    assert rows(found) == [(10012, 50032, 4)]


def test_nothing_is_wanted_in_the_null_block() -> None:
    assert whole(pair(), [[2, 3]], [[0, 8]], 8) == [(10012, 50032, 4)]
    assert whole(pair(end=End.DESTINATION), [[0, 3]], [[7, 8]], 8) == [(10012, 50032, 4)]
    assert whole(pair(), [[2]], [[0]], 4) == []


def test_what_the_source_no_longer_holds_cannot_be_had() -> None:
    with pytest.raises(RemoteProtocolError, match="no longer holds token 4"):
        whole(pair(), [[2, 0]], [[7, 8]], 8)
    with pytest.raises(RemoteProtocolError, match="no longer holds token 0"):
        whole(pair(end=End.DESTINATION), [[7, 8]], [[0, 2]], 8)


def test_outside_the_window_nothing_is_missed() -> None:
    windowed = pair(of(dense(), window=5), of(dense(base=50000), window=5))
    assert whole(windowed, [[0, 3, 4]], [[7, 8, 9]], 12) == [(10012, 50032, 8)]
    with pytest.raises(RemoteProtocolError, match="no longer holds token 4"):
        whole(windowed, [[0, 0, 4]], [[7, 8, 9]], 12)


def test_nothing_to_move_is_no_descriptor() -> None:
    nothing = describe(pair(), [[2]], [[7]], first_token=4, end_token=4, num_tokens=4)
    assert (nothing.num_descriptors, nothing.num_bytes) == (0, 0)


def test_a_destination_that_holds_more_than_any_prompt_gets_nothing() -> None:
    """Found: its first token comes from a message, and did not fit an array of int64."""
    beyond = describe(pair(), [[2]], [[7]], first_token=1 << 70, end_token=1 << 70, num_tokens=4)
    assert beyond.num_descriptors == 0


def test_padding_between_blocks_on_one_side_forbids_joining() -> None:
    padded = describe(
        pair(theirs=of(dense(base=50000, stride=6))), [[2, 3]], [[7, 8]], first_token=0, end_token=8, num_tokens=8
    )
    assert rows(padded) == [(10008, 50042, 4), (10012, 50048, 4)]
    assert (padded.num_descriptors, padded.num_bytes) == (2, 8)


def test_every_cache_group_has_its_own_blocks() -> None:
    both = of(dense(), dense("b", 20000, cache_group=1))
    assert whole(pair(both, both), [[1], [2]], [[3], [4]], 4) == [(10004, 10012, 4), (20008, 20016, 4)]


def test_small_blocks_meet_large_blocks_by_the_position_of_their_tokens() -> None:
    large = of(dense(base=50000, tokens=8), block=8)
    assert whole(pair(theirs=large), [[1, 5, 6]], [[3, 2]], 12) == [
        (10004, 50024, 4),
        (10020, 50028, 4),
        (10024, 50016, 4),
    ]
    assert whole(pair(theirs=large), [[1, 2, 3]], [[3, 4]], 12) == [(10004, 50024, 12)]


def test_a_block_of_several_rows_is_found_row_by_row() -> None:
    """What the kernel calls a block may be a part of what the engine calls one."""
    split = of(dense(base=50000, tokens=2, num_rows=20, stride=3), block=4)
    assert whole(pair(theirs=split), [[1]], [[5]], 4) == [(10004, 50030, 2), (10006, 50033, 2)]


@pytest.mark.parametrize(
    ("ours", "theirs", "named"),
    [
        ([[1, 1]], [[1], [1]], "the peer's block lists are for 2 cache groups; expected 1"),
        ([], [[1]], "our block lists are for 0 cache groups; expected 1"),
        ([[1, 2]], [[1]], "the peer's 1 blocks of 4 tokens cannot hold token 7"),
        ([[1]], [[1, 2]], "our 1 blocks of 4 tokens cannot hold token 7"),
        ([[10, 1]], [[1, 2]], "our block ids span 1 to 10; the registered cache has 10"),
        ([[1, 2]], [[10, 1]], "the peer's block ids span 1 to 10; the registered cache has 10"),
        ([[1, 2]], [[-1, 1]], "the peer's block ids span -1 to 1"),
    ],
)
def test_lists_that_cannot_be_are_refused(ours: list[list[int]], theirs: list[list[int]], named: str) -> None:
    with pytest.raises(RemoteProtocolError, match=named):
        whole(pair(), ours, theirs, 8)


def test_a_first_token_inside_a_block_is_refused() -> None:
    """Rounding it down would write into a block that others may share."""
    with pytest.raises(RemoteProtocolError, match="token 2 is not where a block of 4 tokens begins"):
        describe(pair(), [[1]], [[1]], first_token=2, end_token=4, num_tokens=4)


def test_a_segment_ends_where_no_block_of_either_side_is_cut() -> None:
    assert alignment_tokens((16, 24), (32,)) == 96


@pytest.mark.parametrize("prefill_block", [4, 12])
def test_a_window_wants_decode_blocks_that_lie_within_prefill_blocks(prefill_block: int) -> None:
    """Found: half-filled, a decode block stayed in the prefix cache, and a shorter prompt would have read the other half.

    Filled whole from what the prefill engine still had, it could hold what somebody else wrote there meanwhile.
    """
    small, large = (of(dense(tokens=tokens), block=tokens, window=3) for tokens in (prefill_block, 8))
    said = f"prefill engine's block size {prefill_block} is not a multiple of the decode engine's 8"
    with pytest.raises(Incompatible, match=said):
        pair(small, large)
    with pytest.raises(Incompatible, match=said):
        pair(large, small, End.DESTINATION)


def test_a_destination_block_that_the_window_has_passed_stays_as_it_is() -> None:
    ours, theirs = of(dense(tokens=8), block=8, window=3), of(dense(base=50000), window=3)
    assert whole(pair(ours, theirs), [[0, 0, 5]], [[1, 2, 3, 4, 6]], 20) == [(10040, 50024, 4)]


@pytest.mark.parametrize("end_token", [1 << 40, 1 << 63, 1 << 64])
def test_more_tokens_than_the_lists_hold_cost_nothing(end_token: int) -> None:
    """Found: room for all of them was made before the lists were counted, and the transfer thread ended."""
    with pytest.raises(RemoteProtocolError, match="our 1 blocks of 4 tokens cannot hold token"):
        describe(pair(), [[1]], [[1]], first_token=0, end_token=end_token, num_tokens=end_token)

"""What a layout must be before it is believed."""

from __future__ import annotations

import pytest

from kvbaton.errors import Incompatible, RemoteProtocolError
from kvbaton.geometry.layout import MAX_REGIONS, Part, bytes_per_token, check_blocks, plain
from tests.unit.geometry.layouts import layout, region


def test_a_region_ends_behind_its_last_token_not_where_the_next_row_would_start() -> None:
    assert region(base_address=1000, row_stride_bytes=200, num_rows=3).end_address == 1000 + 2 * 200 + 128


def test_heads_may_lie_outside_the_rows() -> None:
    """The order LHBNC: all rows of a head, then all rows of the next."""
    heads_first = region(row_stride_bytes=64, head_stride_bytes=512, parts=plain(4, 4))
    layout(heads_first).validate()
    assert heads_first.end_address == 4096 + 7 * 64 + 512 + 15 * 4 + 4


def test_a_complete_layout_is_valid() -> None:
    layout().validate()


def test_bytes_per_token_counts_every_head_of_every_layer() -> None:
    assert bytes_per_token(layout()) == 2 * 2 * 4


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (layout(regions=()), "0 regions"),
        (layout(regions=(region(),) * (MAX_REGIONS + 1)), "4097 regions"),
        (layout(block_size_tokens=()), "0 block sizes"),
        (layout(window_tokens=()), "1 block sizes and 0 windows"),
        (layout(block_size_tokens=(16, 0), window_tokens=(0, 0)), "block sizes"),
        (layout(block_size_tokens=(1 << 40,)), "block sizes"),
        (layout(window_tokens=(-1,)), "windows"),
        (layout(tp_size=0), "tensor-parallel rank 0 of 0"),
        (layout(tp_size=2, tp_rank=2), "rank 2 of 2"),
        (layout(tp_size=2, tp_rank=-1), "rank -1 of 2"),
        (layout(tp_size=1 << 40), "rank 0 of"),
        (layout(pp_size=2, pp_rank=2), "pipeline-parallel rank 2 of 2"),
        (layout(device_id=-1), "device -1"),
        (layout(device_id=1 << 64), "device"),
        (layout(region("twice"), region("twice")), "names a layer twice"),
        (layout(region("x", cache_group=1)), "'x'"),
        (layout(region("x", cache_group=-1)), "'x'"),
        (layout(region("x", parts=())), "'x'"),
        (layout(region("x", parts=plain(8, 4) * 9)), "'x'"),
        (layout(region("x", parts=plain(8, 0))), "'x'"),
        (layout(region("x", parts=plain(-8, 4))), "'x'"),
        (layout(region("x", parts=plain(0, 4))), "'x'"),
        (layout(region("x", parts=(Part(-1, 1, 8, 1, 4, 4),))), "'x'"),
        (layout(region("x", parts=(Part(0, 0, 8, 1, 4, 4),))), "'x'"),
        (layout(region("x", parts=(Part(0, 3, 8, 1, 4, 4),))), "'x'"),  # a row is whole groups
        (layout(region("x", parts=(Part(0, 32, 8, 1, 4, 4),))), "'x'"),
        (layout(region("x", parts=(Part(0, 1, 8, 0, 4, 4),))), "'x'"),
        (layout(region("x", parts=(Part(0, 1, 8, 1 << 40, 4, 4),))), "'x'"),
        (layout(region("x", parts=(Part(0, 1, 8, 2, -4, 4),))), "'x'"),
        (layout(region("x", row_stride_bytes=0)), "'x'"),
        (layout(region("x", head_stride_bytes=-4)), "'x'"),
        (layout(region("x", row_tokens=0)), "'x'"),
        (layout(region("x", row_tokens=12)), "'x'"),  # a block is whole rows
        (layout(region("x", num_rows=0)), "'x'"),
        (layout(region("x", num_heads=0)), "'x'"),
        (layout(region("x", num_heads=3)), "'x'"),
        (layout(region("x", num_heads=1 << 40, total_heads=1 << 40)), "'x'"),
        (layout(region("x", base_address=0)), "'x'"),
        (layout(region("x", base_address=(1 << 63) - 100)), "'x'"),
        (layout(region("x", num_rows=1 << 60)), "'x'"),
        # One row needs no stride, so the end address alone would let these pass into int64 arrays.
        (layout(region("x", num_rows=1, row_stride_bytes=1 << 63)), "'x'"),
        (layout(region("x", num_heads=1, head_stride_bytes=1 << 63)), "'x'"),
        (layout(region("x", row_tokens=1, parts=plain(1 << 63, 4))), "'x'"),
        (
            layout(region("x", row_tokens=1 << 18, num_heads=2), block_size_tokens=(1 << 18,)),
            "'x'",
        ),  # would be cut into half a million pieces
    ],
)
def test_a_layout_that_contradicts_itself_is_refused_by_name(broken: object, named: str) -> None:
    with pytest.raises(RemoteProtocolError, match=named):
        broken.validate()  # type: ignore[attr-defined]


def test_heads_that_the_rank_cannot_have_are_refused() -> None:
    """Found: one head of eight on the only rank was believed, and the other seven were addressed behind the region's end."""
    with pytest.raises(RemoteProtocolError, match="'x' has 1 heads on tensor-parallel rank 0 of 1; of 8 it holds 8"):
        layout(region("x", num_heads=1, total_heads=8)).validate()
    with pytest.raises(Incompatible, match="2 KV heads cannot be spread over 3"):
        layout(tp_size=3).validate()


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        ([], "block lists for 0 cache groups from a rank that has 1"),
        ([[1], [2]], "block lists for 2 cache groups from a rank that has 1"),
        ([[-1]], "1 block ids up to -1"),
        ([[0, 1 << 40]], "2 block ids up to"),
        ([[0] * 10_000], "10000 block ids up to 0"),
    ],
)
def test_blocks_that_a_rank_cannot_have_are_refused(blocks: list[list[int]], said: str) -> None:
    with pytest.raises(RemoteProtocolError, match=said):
        check_blocks(layout(), blocks)


def test_blocks_that_a_rank_has_are_not() -> None:
    check_blocks(layout(), [[0, 1]])
    check_blocks(layout(), [[]])

"""What a layout must be before it is believed."""

from __future__ import annotations

import pytest

from kvbaton.errors import Incompatible, RemoteProtocolError
from kvbaton.geometry.layout import MAX_BLOCK_TOKENS, MAX_GROUPS, MAX_RANKS, MAX_REGIONS, KVLayout, Region
from tests.unit.geometry.layouts import layout, region


def test_a_region_ends_with_its_last_byte_not_where_the_next_row_would_start() -> None:
    assert region(base_address=1000, num_rows=3, row_stride_bytes=100).end_address == 1000 + 2 * 100 + 32 + 15 * 2 + 2


@pytest.mark.parametrize(
    "sound",
    [
        region(),
        region(row_stride_bytes=80),  # padded rows
        region(head_stride_bytes=2, token_stride_bytes=4),  # token-major
        region(head_stride_bytes=8 * 32, row_stride_bytes=32),  # heads outside rows
        region(row_tokens=1, token_stride_bytes=1, row_stride_bytes=64, num_rows=16),  # an axis of one needs no stride
        region(row_tokens=8, num_rows=16, row_stride_bytes=32, head_stride_bytes=16),  # two rows a block
    ],
)
def test_every_axis_order_and_padding_is_valid(sound: Region) -> None:
    layout(sound).validate()


def test_replicated_heads_are_valid() -> None:
    layout(region(num_heads=1, total_heads=1), tp_size=4, tp_rank=3).validate()


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (layout(regions=()), "0 regions"),
        (layout(regions=(region(),) * (MAX_REGIONS + 1)), "4097 regions"),
        (layout(block_size_tokens=()), "block sizes"),
        (layout(block_size_tokens=(16, 0)), "block sizes"),
        (layout(block_size_tokens=(MAX_BLOCK_TOKENS + 1,)), "block sizes"),
        (layout(block_size_tokens=(16,) * (MAX_GROUPS + 1)), "block sizes"),
        (layout(window_tokens=()), "windows"),
        (layout(window_tokens=(-1,)), "windows"),
        (layout(window_tokens=(1 << 63,)), "windows"),
        (layout(tp_size=0), "tensor-parallel rank 0 of 0"),
        (layout(tp_size=MAX_RANKS + 1), "tensor-parallel rank 0 of 1025"),
        (layout(tp_size=2, tp_rank=2), "rank 2 of 2"),
        (layout(tp_size=2, tp_rank=-1), "rank -1 of 2"),
        (layout(pp_size=2, pp_rank=2), "pipeline-parallel rank 2 of 2"),
        (layout(pp_size=1 << 70), "pipeline-parallel rank 0 of"),
        (layout(device_id=-1), "device -1"),
        (layout(device_id=1 << 64), "device"),
        (layout(region("twice"), region("twice")), "names a layer twice"),
        (layout(region("x", cache_group=1)), "'x' is in cache group 1"),
        (layout(region("x", cache_group=-1)), "'x' is in cache group -1"),
        (layout(region("x", num_heads=1)), "'x' has 1 heads on tensor-parallel rank 0 of 1; of 2 it holds 2"),
        (layout(region("x", row_tokens=15)), "'x' has 8 rows of 15 tokens, which do not make whole blocks of 16"),
        (layout(region("x", num_rows=7), block_size_tokens=(32,)), "'x' has 7 rows of 16 tokens"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused_by_name(broken: KVLayout, named: str) -> None:
    with pytest.raises(RemoteProtocolError, match=named):
        broken.validate()


@pytest.mark.parametrize(
    "broken",
    [
        {"base_address": 0},
        {"base_address": 1 << 63},
        {"base_address": (1 << 63) - 100},
        {"content_bytes": 0},
        {"content_bytes": 3},  # tokens would overlap
        {"num_rows": 0},
        {"num_rows": 1 << 60},
        {"row_tokens": 0},
        {"num_heads": 0},
        {"total_heads": 0},
        {"total_heads": 1 << 40},
        {"num_heads": 1 << 20, "total_heads": 1 << 16},
        {"row_stride_bytes": 0},
        {"row_stride_bytes": 63},  # rows would overlap
        {"head_stride_bytes": 31},  # heads would overlap
        {"token_stride_bytes": -2},
        {"head_stride_bytes": 2},  # heads on top of tokens
        # One row needs no stride, so the end address alone would let this one pass into int64 arrays.
        {"num_rows": 1, "row_stride_bytes": 1 << 63},
    ],
)
def test_a_region_that_cannot_be_addressed_is_refused_by_name(broken: dict[str, int]) -> None:
    with pytest.raises(RemoteProtocolError, match="'x' is not addressable"):
        layout(region("x", **broken)).validate()


def test_heads_that_do_not_divide_over_ranks_are_refused() -> None:
    with pytest.raises(Incompatible, match="2 KV heads cannot be divided over tensor-parallel size 3"):
        layout(tp_size=3).validate()

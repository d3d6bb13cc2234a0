"""Which of our regions corresponds to which of a peer's."""

from __future__ import annotations

import pytest

from kvbaton.errors import Incompatible
from kvbaton.geometry.mapping import map_layouts
from tests.unit.geometry.layouts import layout, region


def test_regions_pair_by_layer_name_not_by_position() -> None:
    ours = layout(region("a", base_address=1000), region("b", base_address=2000))
    theirs = layout(region("b", base_address=7000), region("a", base_address=8000))
    (group,) = map_layouts(ours, theirs).groups
    assert (group.our_base.tolist(), group.their_base.tolist()) == ([1000, 2000], [8000, 7000])


def test_every_cache_group_has_its_own_regions_and_block_size() -> None:
    regions = (region("a"), region("b", cache_group=1, block_stride_bytes=128, block_bytes=96))
    mapping = map_layouts(*[layout(*regions, block_size_tokens=(16, 32))] * 2)
    assert mapping.block_size_tokens == (16, 32)
    assert [group.block_bytes.tolist() for group in mapping.groups] == [[64], [96]]
    assert [group.our_stride.tolist() for group in mapping.groups] == [[64], [128]]


def test_a_group_has_as_many_blocks_as_its_smallest_region() -> None:
    ours = layout(region("a", num_blocks=8), region("b", num_blocks=6))
    theirs = layout(region("a", num_blocks=3), region("b", num_blocks=9))
    (group,) = map_layouts(ours, theirs).groups
    assert (group.our_num_blocks, group.their_num_blocks) == (6, 3)


def test_a_group_without_regions_has_no_blocks() -> None:
    mapping = map_layouts(*[layout(block_size_tokens=(16, 16))] * 2)
    assert mapping.groups[1].our_num_blocks == mapping.groups[1].their_num_blocks == 0


def test_incompatible_layouts_are_not_mapped() -> None:
    with pytest.raises(Incompatible):
        map_layouts(layout(), layout(dtype="fp8"))

"""The bytes that descriptors name are the bytes that were asked for, whatever the block lists and the strides."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvbaton.geometry.descriptors import describe
from kvbaton.geometry.layout import KVLayout, Region
from kvbaton.geometry.mapping import map_layouts

NUM_BLOCKS = 24
BlockList = list[int]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[KVLayout, KVLayout]:
    """Two layouts of the same layers, each with addresses and paddings of its own."""
    num_groups = draw(st.integers(1, 3))
    groups = [*range(num_groups), *draw(st.lists(st.integers(0, num_groups - 1), max_size=2))]
    shapes = [(f"layer.{index}", group, draw(st.integers(1, 5))) for index, group in enumerate(groups)]
    return tuple(_layout(draw, shapes, num_groups) for _ in range(2))  # type: ignore[return-value]


def _layout(draw: st.DrawFn, shapes: list[tuple[str, int, int]], num_groups: int) -> KVLayout:
    regions, address = [], 1
    for layer, group, block_bytes in draw(st.permutations(shapes)):
        region = Region(layer, group, address, block_bytes + draw(st.sampled_from((0, 0, 3))), block_bytes, NUM_BLOCKS)
        regions.append(region)
        address = region.end_address + draw(st.integers(0, 4))
    layout = KVLayout(
        regions=tuple(regions),
        block_size_tokens=(16,) * num_groups,
        memory_kind="DRAM",
        device_id=0,
        model="m",
        dtype="d",
        num_kv_heads=1,
        head_dim=1,
        axis_order="LBNHC",
        tp_size=1,
        tp_rank=0,
        pp_size=1,
    )
    layout.validate()
    return layout


@st.composite
def block_lists(draw: st.DrawFn) -> BlockList:
    """Runs up, runs down and single blocks, each id once; null blocks in between as often as they like."""
    free, found = list(range(1, NUM_BLOCKS)), []
    for length in draw(st.lists(st.integers(1, 6), max_size=8)):
        if not free:
            break
        start = draw(st.sampled_from(free))
        run = [block for block in range(start, start + length) if block in free]
        if draw(st.booleans()):
            run.reverse()
        free = [block for block in free if block not in run]
        found += run + [0] * draw(st.sampled_from((0, 0, 0, 1)))
    return found


@given(layouts(), st.data())
def test_the_described_byte_pairs_are_the_brute_force_ones(
    layouts: tuple[KVLayout, KVLayout], data: st.DataObject
) -> None:
    ours, theirs = layouts
    our_lists, their_lists = [], []
    for _ in ours.block_size_tokens:
        pair = data.draw(st.tuples(block_lists(), block_lists()))
        length = min(map(len, pair))
        our_lists.append(pair[0][:length])
        their_lists.append(pair[1][:length])

    found = describe(map_layouts(ours, theirs), our_lists, their_lists)

    described = [
        (our + offset, their + offset)
        for our, their, length in zip(
            found.our_address.tolist(), found.their_address.tolist(), found.length_bytes.tolist(), strict=True
        )
        for offset in range(length)
    ]
    assert len(described) == len(set(described)) == found.num_bytes
    assert set(described) == set(_brute_force(ours, theirs, our_lists, their_lists))


def _brute_force(
    ours: KVLayout, theirs: KVLayout, our_lists: list[BlockList], their_lists: list[BlockList]
) -> list[tuple[int, int]]:
    pairs = []
    for mine in ours.regions:
        other = next(region for region in theirs.regions if region.layer == mine.layer)
        for our_block, their_block in zip(our_lists[mine.cache_group], their_lists[mine.cache_group], strict=True):
            if our_block and their_block:
                our = mine.base_address + our_block * mine.block_stride_bytes
                their = other.base_address + their_block * other.block_stride_bytes
                pairs += [(our + offset, their + offset) for offset in range(mine.block_bytes)]
    return pairs


@given(block_lists(), st.integers(1, 3))
def test_blocks_that_abut_need_one_descriptor_per_run_and_region(blocks: BlockList, num_regions: int) -> None:
    """Both sides the same list: as many descriptors as maximal runs, however the list goes up and down."""
    regions = tuple(Region(f"layer.{i}", 0, 1 + 1000 * i, 4, 4, NUM_BLOCKS) for i in range(num_regions))
    layout = KVLayout(
        regions=regions,
        block_size_tokens=(16,),
        memory_kind="DRAM",
        device_id=0,
        model="m",
        dtype="d",
        num_kv_heads=1,
        head_dim=1,
        axis_order="LBNHC",
        tp_size=1,
        tp_rank=0,
        pp_size=1,
    )
    found = describe(map_layouts(layout, layout), [blocks], [blocks])
    real = [block for block in blocks if block]
    num_runs, step = min(len(real), 1), 0
    for before, block in itertools.pairwise(real):
        joins = abs(block - before) == 1 and step in {0, block - before}
        step = block - before if joins else 0
        num_runs += not joins
    assert found.num_descriptors == num_runs * num_regions

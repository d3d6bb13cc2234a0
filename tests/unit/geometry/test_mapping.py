"""What is prepared once per peer."""

from __future__ import annotations

import pytest

from kvbaton.errors import Incompatible
from kvbaton.geometry.mapping import GroupPair, alignment_tokens, map_layouts
from kvbaton.types import End
from tests.unit.geometry.layouts import layout, region


def sides(pair: GroupPair) -> tuple[int, int]:
    return pair.ours.cache_group, pair.theirs.cache_group


def test_regions_pair_by_layer_name_not_by_position() -> None:
    ours = layout(region("a", base_address=1000), region("b", base_address=2000))
    theirs = layout(region("b", base_address=7000), region("a", base_address=8000))
    ((layers,),) = (pair.classes for pair in map_layouts(ours, theirs, End.SOURCE).pairs)
    assert (layers.our_base.tolist(), layers.their_base.tolist()) == ([1000, 2000], [8000, 7000])


def test_the_same_layout_on_both_sides_is_one_piece_per_row() -> None:
    ((layers,),) = (pair.classes for pair in map_layouts(layout(), layout(), End.SOURCE).pairs)
    assert (layers.chunk_tokens, layers.piece_bytes.tolist()) == (16, [64])


def test_groups_pair_through_their_layers_whatever_their_numbers() -> None:
    sizes = {"block_size_tokens": (16, 16), "window_tokens": (0, 0)}
    ours = layout(region("a", cache_group=0), region("b", cache_group=1), **sizes)
    theirs = layout(region("a", cache_group=1), region("b", cache_group=0), **sizes)
    assert [sides(pair) for pair in map_layouts(ours, theirs, End.SOURCE).pairs] == [(0, 1), (1, 0)]


def test_a_group_that_is_two_groups_at_the_peer_pairs_with_both() -> None:
    ours = layout(region("a"), region("b"))
    theirs = layout(region("a"), region("b", cache_group=1), block_size_tokens=(16, 16), window_tokens=(0, 0))
    mapping = map_layouts(ours, theirs, End.SOURCE)
    assert [sides(pair) for pair in mapping.pairs] == [(0, 0), (0, 1)]
    assert (mapping.our_num_groups, mapping.their_num_groups) == (1, 2)


def test_a_group_without_layers_of_this_stage_pairs_with_nothing() -> None:
    stage = layout(region("a"), block_size_tokens=(16, 16), window_tokens=(0, 0), pp_size=2)
    whole = layout(region("a"), region("b", cache_group=1), block_size_tokens=(16, 16), window_tokens=(0, 0))
    assert [sides(pair) for pair in map_layouts(stage, whole, End.SOURCE).pairs] == [(0, 0)]


def test_a_group_has_as_many_blocks_as_its_smallest_region() -> None:
    ours = layout(region("a", num_rows=8), region("b", num_rows=6), block_size_tokens=(32,))
    theirs = layout(region("a", num_rows=3), region("b", num_rows=9))
    (pair,) = map_layouts(ours, theirs, End.SOURCE).pairs
    assert (pair.ours.num_blocks, pair.theirs.num_blocks) == (3, 3)


@pytest.mark.parametrize("our_end", End)
def test_the_window_is_the_destinations(our_end: End) -> None:
    keeps_all, needs_window = layout(), layout(window_tokens=(48,))
    pair = (keeps_all, needs_window) if our_end is End.SOURCE else (needs_window, keeps_all)
    assert map_layouts(*pair, our_end).pairs[0].window_tokens == 48


def test_layers_of_different_shapes_are_different_classes() -> None:
    regions = (region("a"), region("b", row_stride_bytes=128), region("c", base_address=1 << 20))
    ((first, second),) = (pair.classes for pair in map_layouts(layout(*regions), layout(*regions), End.SOURCE).pairs)
    assert (first.our_base.size, second.our_base.size) == (2, 1)


def test_a_class_whose_heads_go_elsewhere_is_left_out() -> None:
    """The latent layer comes from copy 0 of each head's rank; this prefill rank feeds only the other layer."""
    prefill = layout(region("a", num_heads=1), region("latent", num_heads=1, total_heads=1), tp_size=2, tp_rank=1)
    decode = layout(region("a"), region("latent", num_heads=1, total_heads=1))
    ((layers,),) = (pair.classes for pair in map_layouts(prefill, decode, End.SOURCE).pairs)
    assert layers.our_base.size == 1
    assert layers.their_offset.tolist() == [32]  # into the second head of "a"


def test_layers_that_abut_on_both_sides_become_one() -> None:
    """Blocks outside layers: each block holds all layers' rows side by side."""
    regions = [region(f"layer.{i}", base_address=1000 + 64 * i, row_stride_bytes=64 * 160) for i in range(160)]
    ((layers,),) = (pair.classes for pair in map_layouts(layout(*regions), layout(*regions), End.SOURCE).pairs)
    assert (layers.our_base.tolist(), layers.piece_bytes.tolist()) == ([1000], [64 * 160])


def test_layers_that_abut_on_one_side_only_stay_apart() -> None:
    packed = layout(*(region(f"layer.{i}", base_address=1000 + 64 * i, row_stride_bytes=64 * 4) for i in range(4)))
    apart = layout(*(region(f"layer.{i}", base_address=1000 + 4096 * i) for i in range(4)))
    for ours, theirs in ((packed, apart), (apart, packed)):
        ((layers,),) = (pair.classes for pair in map_layouts(ours, theirs, End.SOURCE).pairs)
        assert (layers.our_base.size, layers.piece_bytes.tolist()) == (4, [64])


def test_incompatible_layouts_are_not_mapped() -> None:
    with pytest.raises(Incompatible):
        map_layouts(layout(), layout(dtype="fp8"), End.SOURCE)


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"), [((16,), (16,), 16), ((32,), (64,), 64), ((48, 16), (32,), 96), ((1,), (7,), 7)]
)
def test_a_cut_at_the_alignment_divides_no_block(ours: tuple[int, ...], theirs: tuple[int, ...], expected: int) -> None:
    assert alignment_tokens(ours, theirs) == alignment_tokens(theirs, ours) == expected

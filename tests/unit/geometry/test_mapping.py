"""What two layouts must share before bytes move between them, and what is prepared once per peer."""

from __future__ import annotations

import pytest

from kvbaton.errors import Incompatible
from kvbaton.geometry.layout import Part, plain
from kvbaton.geometry.mapping import map_layouts
from kvbaton.types import End
from tests.unit.geometry.layouts import layout, region

SOURCE, DESTINATION = End.SOURCE, End.DESTINATION


@pytest.mark.parametrize(
    "changed",
    [
        {"axis_order": "LBHNC"},
        {"regions": (region("layer.0", row_stride_bytes=256), region("layer.1", base_address=1 << 40))},
        {"block_size_tokens": (32,)},
        {"block_size_tokens": (32,), "regions": (region("layer.0", row_tokens=32), region("layer.1"))},
    ],
)
@pytest.mark.parametrize("our_end", [SOURCE, DESTINATION])
def test_addresses_strides_orders_and_block_sizes_may_differ(changed: dict[str, object], our_end: End) -> None:
    assert len(map_layouts(layout(), layout(**changed), our_end).pairs) == 1


@pytest.mark.parametrize(
    ("changed", "named", "values"),
    [
        ({"model": "other, 2 layers"}, "model", ("tiny, 2 layers", "other, 2 layers")),
        ({"dtype": "float16"}, "KV cache dtype", ("bfloat16", "float16")),
        ({"memory_kind": "VRAM"}, "kind of memory", ("DRAM", "VRAM")),
        ({"num_kv_heads": 4}, "number of KV heads", ("2", "4")),
        ({"head_dim": 16}, "head dimension", ("8", "16")),
        ({"window_tokens": (64,)}, "sliding window of layer layer.0", ("0", "64")),
        ({"regions": (region("layer.0"),)}, "set of layers", ("'layer.1'", r"\[\]")),
        ({"regions": (region("layer.0", parts=plain(8, 2)), region("layer.1"))}, "parts of a token", ("4", "2")),
        ({"packing": "cpu vec"}, "order inside the attention kernel's blocks", ("", "cpu vec")),
        ({"regions": (region("layer.0", total_heads=4), region("layer.1"))}, "KV heads of layer layer.0", ("2", "4")),
    ],
)
def test_what_must_not_differ_is_named_with_both_values(
    changed: dict[str, object], named: str, values: tuple[str, str]
) -> None:
    expected = f"{named}.* differs: .*{values[0]}.* on this engine, .*{values[1]}.* on the"
    with pytest.raises(Incompatible, match=expected):
        map_layouts(layout(), layout(**changed), SOURCE)


def test_causes_are_reported_before_effects() -> None:
    with pytest.raises(Incompatible, match="model differs"):
        map_layouts(layout(), layout(model="other", head_dim=99, regions=(region("other"),)), SOURCE)


def test_a_difference_of_many_layers_is_told_in_few_words() -> None:
    mine = layout(*(region(f"mine.{i}") for i in range(1000)))
    theirs = layout(*(region(f"theirs.{i}") for i in range(1000)))
    with pytest.raises(Incompatible) as refused:
        map_layouts(mine, theirs, SOURCE)
    assert len(str(refused.value)) < 1000


def test_a_stage_of_the_prefill_engine_has_some_of_the_layers() -> None:
    stage = layout(region("layer.1"), pp_size=2, pp_rank=1)
    assert map_layouts(stage, layout(), SOURCE).pairs[0].classes[0].our_base.tolist() == [4096]
    assert map_layouts(layout(), stage, DESTINATION).pairs[0].classes[0].our_base.tolist() == [8192]


def test_a_stage_with_a_layer_that_the_decode_engine_lacks_is_refused() -> None:
    stage = layout(region("layer.7"), pp_size=2, pp_rank=1)
    with pytest.raises(Incompatible, match="set of layers"):
        map_layouts(stage, layout(), SOURCE)


@pytest.mark.parametrize("our_end", [SOURCE, DESTINATION])
def test_stages_on_the_decode_side_are_refused_by_name(our_end: End) -> None:
    one, two = layout(), layout(pp_size=2)
    ours, theirs = (one, two) if our_end is SOURCE else (two, one)
    with pytest.raises(Incompatible, match="the decode engine has pipeline-parallel size 2"):
        map_layouts(ours, theirs, our_end)


def test_sizes_that_do_not_divide_the_heads_are_refused_by_name() -> None:
    with pytest.raises(Incompatible, match="2 KV heads cannot be spread over 3"):
        map_layouts(layout(), layout(tp_size=3), SOURCE)


def test_layers_that_abut_on_both_sides_count_as_one() -> None:
    """Block-outermost caches: all layers of a block in one stretch. Hundreds of descriptors become one."""
    together = tuple(region(f"layer.{i}", base_address=4096 + 128 * i, row_stride_bytes=512) for i in range(4))
    (pair,) = map_layouts(layout(*together), layout(*together), SOURCE).pairs
    assert [(each.our_base.tolist(), each.pieces.length_bytes.tolist()) for each in pair.classes] == [([4096], [512])]


def test_tokens_that_are_packed_together_are_never_parted() -> None:
    """Some kernels order a block inside by their own rules: equal blocks can be copied, unequal ones cannot be cut."""
    packed = (Part(0, 16, 128, 1, 128, 128),)
    mine = layout(region("layer.0", parts=packed, head_stride_bytes=1024), region("layer.1", base_address=1 << 20))
    map_layouts(mine, mine, SOURCE)
    larger = region("layer.0", parts=packed, head_stride_bytes=1024, row_tokens=48)
    theirs = layout(larger, region("layer.1", base_address=1 << 20, row_tokens=8), block_size_tokens=(48,))
    map_layouts(mine, theirs, SOURCE)
    smaller = region("layer.0", parts=(Part(0, 8, 64, 1, 64, 64),), head_stride_bytes=1024, row_tokens=24)
    with pytest.raises(
        Incompatible, match=r"block size differs: 16 on this engine, 24 on the peer.*packs 16 and 8 tokens"
    ):
        map_layouts(mine, layout(smaller, region("layer.1"), block_size_tokens=(48,)), SOURCE)


def test_layers_that_abut_on_one_side_only_stay_apart() -> None:
    together = tuple(region(f"layer.{i}", base_address=4096 + 128 * i, row_stride_bytes=512) for i in range(2))
    (pair,) = map_layouts(layout(*together), layout(), SOURCE).pairs
    assert pair.classes[0].our_base.size == 2


def test_layers_of_another_shape_are_a_class_of_their_own() -> None:
    mixed = (region("layer.0"), region("layer.1", base_address=8192, row_stride_bytes=256))
    (pair,) = map_layouts(layout(*mixed), layout(*mixed), SOURCE).pairs
    assert len(pair.classes) == 2


def test_cache_groups_pair_by_their_layers_whatever_their_numbers() -> None:
    mine = layout(
        region("layer.0"), region("layer.1", cache_group=1), block_size_tokens=(16, 16), window_tokens=(0, 32)
    )
    theirs = layout(
        region("layer.0", cache_group=1), region("layer.1"), block_size_tokens=(16, 16), window_tokens=(32, 0)
    )
    pairs = map_layouts(mine, theirs, SOURCE).pairs
    assert [(pair.our_group, pair.their_group, pair.window_tokens) for pair in pairs] == [(0, 1, 0), (1, 0, 32)]


def test_a_copy_that_is_taken_elsewhere_moves_nothing() -> None:
    latent = (region("layer.0", num_heads=1, total_heads=1), region("layer.1", num_heads=1, total_heads=1))
    mine = layout(*latent, tp_size=2, tp_rank=1, num_kv_heads=1)
    theirs = layout(*latent, num_kv_heads=1)
    assert map_layouts(mine, theirs, SOURCE).pairs == ()


def test_the_peer_cannot_choose_how_long_we_prepare() -> None:
    """Found: the work was (chunks in our row) x (chunks in theirs); coprime rows kept the transfer thread for minutes."""
    rows = {"row_tokens": (1 << 18) - 1, "row_stride_bytes": 1 << 30, "num_heads": 1, "total_heads": 1, "num_rows": 2}
    theirs = layout(region("layer.0", **rows), block_size_tokens=((1 << 18) - 1,))
    theirs.validate()
    ours = layout(region("layer.0", num_heads=1, total_heads=1))
    ((alike,),) = (pair.classes for pair in map_layouts(ours, theirs, SOURCE).pairs)
    assert (alike.chunk_tokens, alike.pieces.ours.size) == (1, 1)


@pytest.mark.parametrize("other", [(8, 1, 64), (16, 2, 64)])
def test_packed_tokens_that_a_peer_packs_otherwise_are_refused(other: tuple[int, int, int]) -> None:
    """Found: the pieces of the two sides were counted differently, and the transfer thread ended in an IndexError."""
    mine = layout(region("layer.0", parts=(Part(0, 16, 128, 1, 128, 128),), head_stride_bytes=1024))
    packed, num_units, unit_bytes = other
    parts = (Part(0, packed, 64, num_units, 64, unit_bytes),)
    theirs = layout(region("layer.0", parts=parts, head_stride_bytes=1024))
    for pair in ((mine, theirs), (theirs, mine)):
        with pytest.raises(Incompatible, match="Start both engines with the same block size"):
            map_layouts(pair[0], pair[1], SOURCE)

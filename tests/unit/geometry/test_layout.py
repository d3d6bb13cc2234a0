"""What a layout must be before it is believed, and what two must share before bytes move between them."""

from __future__ import annotations

import pytest

from kvbaton.errors import Incompatible, RemoteProtocolError
from kvbaton.geometry.layout import MAX_REGIONS, require_compatible
from tests.unit.geometry.layouts import layout, region


def test_a_region_ends_where_its_last_block_does_not_where_the_next_would_start() -> None:
    assert region(base_address=1000, block_stride_bytes=100, block_bytes=60, num_blocks=3).end_address == 1260


def test_a_complete_layout_is_valid() -> None:
    layout().validate()


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (layout(regions=()), "0 regions"),
        (layout(regions=(region(),) * (MAX_REGIONS + 1)), "4097 regions"),
        (layout(block_size_tokens=()), "block sizes"),
        (layout(block_size_tokens=(16, 0)), "block sizes"),
        (layout(tp_size=0), "rank 0 of 0"),
        (layout(tp_size=2, tp_rank=2), "rank 2 of 2"),
        (layout(tp_size=2, tp_rank=-1), "rank -1 of 2"),
        (layout(device_id=-1), "device -1"),
        (layout(device_id=1 << 64), "device"),
        (layout(region("twice"), region("twice")), "names a layer twice"),
        (layout(region("x", cache_group=1)), "'x'"),
        (layout(region("x", cache_group=-1)), "'x'"),
        (layout(region("x", block_bytes=0)), "'x'"),
        (layout(region("x", block_bytes=65)), "'x'"),
        (layout(region("x", num_blocks=0)), "'x'"),
        (layout(region("x", base_address=0)), "'x'"),
        (layout(region("x", base_address=(1 << 63) - 100)), "'x'"),
        (layout(region("x", num_blocks=1 << 60)), "'x'"),
        # One block needs no stride, so the end address alone would let this one pass into int64 arrays.
        (layout(region("x", num_blocks=1, block_stride_bytes=1 << 63)), "'x'"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused_by_name(broken: object, named: str) -> None:
    with pytest.raises(RemoteProtocolError, match=named):
        broken.validate()  # type: ignore[attr-defined]


def test_addresses_and_strides_may_differ_between_peers() -> None:
    padded = layout(region("layer.0", block_stride_bytes=128), region("layer.1", base_address=1 << 40))
    require_compatible(layout(), padded)


@pytest.mark.parametrize(
    ("changed", "named", "values"),
    [
        ({"model": "other, 2 layers"}, "model", ("tiny, 2 layers", "other, 2 layers")),
        ({"dtype": "float16"}, "KV cache dtype", ("bfloat16", "float16")),
        ({"memory_kind": "VRAM"}, "kind of memory", ("DRAM", "VRAM")),
        ({"tp_size": 2}, "tensor-parallel size", ("1", "2")),
        ({"tp_rank": 1}, "tensor-parallel rank", ("0", "1")),
        ({"pp_size": 2}, "pipeline-parallel size", ("1", "2")),
        ({"block_size_tokens": (32,)}, "block size", ("[16]", "[32]")),
        ({"num_kv_heads": 1}, "number of KV heads per rank", ("2", "1")),
        ({"head_dim": 16}, "head dimension", ("8", "16")),
        ({"axis_order": "LBHNC"}, "KV cache axis order", ("LBNHC", "LBHNC")),
        ({"regions": (region("layer.0"),)}, "set of layers", ("'layer.1'", r"\[\]")),
        ({"regions": (region("layer.0", block_bytes=32), region("layer.1"))}, "set of layers", ("64", "32")),
    ],
)
def test_what_differs_is_named_with_both_values(
    changed: dict[str, object], named: str, values: tuple[str, str]
) -> None:
    with pytest.raises(Incompatible, match=f"{named} differs: .*{values[0]}.* on this engine, .*{values[1]}.* on the"):
        require_compatible(layout(), layout(**changed))


def test_causes_are_reported_before_effects() -> None:
    with pytest.raises(Incompatible, match="model differs"):
        require_compatible(layout(), layout(model="other", head_dim=99, regions=(region("other"),)))


def test_a_difference_of_many_layers_is_told_in_few_words() -> None:
    mine = layout(*(region(f"mine.{i}") for i in range(1000)))
    theirs = layout(*(region(f"theirs.{i}") for i in range(1000)))
    with pytest.raises(Incompatible) as refused:
        require_compatible(mine, theirs)
    assert len(str(refused.value)) < 1000

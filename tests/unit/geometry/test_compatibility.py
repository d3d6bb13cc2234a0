"""What two engines must share before bytes move between them, and how it is told when they do not."""

from __future__ import annotations

import pytest

from kvbaton.errors import Incompatible
from kvbaton.geometry.compatibility import require_compatible
from kvbaton.geometry.layout import KVLayout
from kvbaton.types import End
from tests.unit.geometry.layouts import layout, region


@pytest.mark.parametrize("our_end", End)
@pytest.mark.parametrize(
    "other",
    [
        layout(region("layer.0", row_stride_bytes=128), region("layer.1", base_address=1 << 40)),
        layout(region("layer.0"), region("layer.1", cache_group=1), block_size_tokens=(32, 16), window_tokens=(0, 0)),
        layout(axis_order="LHBNC", device_id=3, tp_size=2, tp_rank=1),
    ],
)
def test_addresses_strides_groups_sizes_and_ranks_may_differ(other: KVLayout, our_end: End) -> None:
    require_compatible(layout(), other, our_end)


@pytest.mark.parametrize(
    ("changed", "named", "values"),
    [
        ({"model": "other, 2 layers"}, "model", ("tiny, 2 layers", "other, 2 layers")),
        ({"dtype": "float16"}, "KV cache dtype", ("bfloat16", "float16")),
        ({"memory_kind": "VRAM"}, "kind of memory", ("DRAM", "VRAM")),
        ({"num_kv_heads": 1}, "number of KV heads", ("2", "1")),
        ({"head_dim": 16}, "head dimension", ("8", "16")),
        ({"regions": (region("layer.0"),)}, "set of layers", ("'layer.1'", r"\[\]")),
        ({"regions": (region("layer.0"), region("layer.1", total_heads=4))}, "KV heads of layer.1", ("2", "4")),
        (
            {"regions": (region("layer.0"), region("layer.1", content_bytes=1))},
            "bytes per head and token of layer.1",
            ("2", "1"),
        ),
    ],
)
def test_what_differs_is_named_with_both_values(
    changed: dict[str, object], named: str, values: tuple[str, str]
) -> None:
    for our_end in End:
        with pytest.raises(
            Incompatible, match=f"{named} differs: .*{values[0]}.* on this engine, .*{values[1]}.* on the peer. Start"
        ):
            require_compatible(layout(), layout(**changed), our_end)


def test_causes_are_reported_before_effects() -> None:
    with pytest.raises(Incompatible, match="model differs"):
        require_compatible(layout(), layout(model="other", head_dim=99, regions=(region("other"),)), End.SOURCE)


def test_a_difference_of_many_layers_is_told_in_few_words() -> None:
    mine = layout(*(region(f"mine.{i}") for i in range(1000)))
    theirs = layout(*(region(f"theirs.{i}") for i in range(1000)))
    with pytest.raises(Incompatible) as refused:
        require_compatible(mine, theirs, End.SOURCE)
    assert len(str(refused.value)) < 1000


def test_a_stage_of_the_prefill_engine_has_some_of_the_layers() -> None:
    stage = layout(region("layer.1"), pp_size=2, pp_rank=1)
    require_compatible(stage, layout(), End.SOURCE)
    require_compatible(layout(), stage, End.DESTINATION)


def test_a_stage_with_a_layer_that_decode_lacks_is_refused() -> None:
    stage = layout(region("layer.7"), pp_size=2, pp_rank=1)
    with pytest.raises(Incompatible, match=r"set of layers differs: \['layer.7'\] on this engine"):
        require_compatible(stage, layout(), End.SOURCE)


@pytest.mark.parametrize("our_end", End)
def test_stages_on_the_decode_side_are_refused_with_both_sizes(our_end: End) -> None:
    staged, whole = layout(pp_size=2), layout()
    pair = (whole, staged) if our_end is End.SOURCE else (staged, whole)
    with pytest.raises(Incompatible, match="decode engine has pipeline-parallel size 2 and the prefill engine 1"):
        require_compatible(*pair, our_end)


def test_a_source_that_keeps_everything_serves_a_window() -> None:
    require_compatible(layout(window_tokens=(0,)), layout(window_tokens=(64,)), End.SOURCE)


@pytest.mark.parametrize("needed", [0, 128])
def test_a_source_that_keeps_a_window_does_not_serve_who_needs_another(needed: int) -> None:
    with pytest.raises(
        Incompatible, match=f"sliding window of layer.0 differs: 64 on this engine, {needed} on the peer"
    ):
        require_compatible(layout(window_tokens=(64,)), layout(window_tokens=(needed,)), End.SOURCE)
    with pytest.raises(
        Incompatible, match=f"sliding window of layer.0 differs: {needed} on this engine, 64 on the peer"
    ):
        require_compatible(layout(window_tokens=(needed,)), layout(window_tokens=(64,)), End.DESTINATION)

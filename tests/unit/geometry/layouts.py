"""Layouts to test with: small, complete, and easy to vary in one field."""

from __future__ import annotations

import msgspec

from kvbaton.geometry.layout import KVLayout, Region, plain


def region(layer: str = "layer.0", **changed: object) -> Region:
    """Eight blocks of 16 tokens, two heads, four bytes of content, token-major and dense: 128 bytes per block."""
    values: dict[str, object] = {
        "cache_group": 0,
        "base_address": 4096,
        "num_rows": 8,
        "row_stride_bytes": 128,
        "row_tokens": 16,
        "num_heads": 2,
        "total_heads": 2,
        "head_stride_bytes": 4,
        "parts": plain(8, 4),
    }
    return Region(layer, **(values | changed))  # type: ignore[arg-type]  # the keys above are the region's own


def layout(*regions: Region, **changed: object) -> KVLayout:
    whole = KVLayout(
        regions=regions or (region("layer.0"), region("layer.1", base_address=8192)),
        block_size_tokens=(16,),
        window_tokens=(0,),
        memory_kind="DRAM",
        device_id=0,
        model="tiny, 2 layers",
        dtype="bfloat16",
        num_kv_heads=2,
        head_dim=8,
        axis_order="LBNHC",
        packing="",
        tp_size=1,
        tp_rank=0,
        pp_size=1,
        pp_rank=0,
    )
    return msgspec.structs.replace(whole, **changed)

"""A peer's layout is either refused, or nothing it says leads outside the regions of either side."""

from __future__ import annotations

import math

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.errors import Incompatible, RemoteProtocolError
from kvbaton.geometry.descriptors import describe
from kvbaton.geometry.layout import KVLayout, Part, Region, plain
from kvbaton.geometry.mapping import map_layouts
from kvbaton.types import End
from tests.unit.geometry.layouts import layout, region

numbers = st.sampled_from((1, 2, 3, 7, 16, 48, 1 << 18, 1 << 40, (1 << 63) - 1, 0, -1)) | st.integers(1, 64)
strides = st.sampled_from((1, 4, 64, 1 << 10, 1 << 20, 1 << 40)) | numbers
REGION_NUMBERS = [field.name for field in msgspec.structs.fields(Region) if field.type is int]


@st.composite
def strange(draw: st.DrawFn) -> KVLayout:
    """A layout of plausible shape and any strides, in which at most one number of a region is another."""
    row_tokens = draw(st.sampled_from((1, 2, 5, 8, 16, 24)))
    parts = tuple(Part(draw(strides), 1, draw(strides), 1, draw(strides), 4) for _ in range(draw(st.integers(1, 2))))
    made = region(
        "layer.0",
        row_tokens=row_tokens,
        num_rows=draw(st.integers(4, 12)),
        row_stride_bytes=draw(strides),
        head_stride_bytes=draw(strides),
        parts=parts[: draw(st.sampled_from((1, 1, 1, 2)))],
    )
    changed = draw(st.just({}) | st.dictionaries(st.sampled_from(REGION_NUMBERS), numbers, max_size=1))
    regions = (msgspec.structs.replace(made, **changed), region("layer.1", base_address=1 << 50, parts=plain(8, 4)))
    block_tokens = math.lcm(row_tokens, 16)
    return layout(
        *regions, block_size_tokens=(block_tokens,), window_tokens=(draw(st.sampled_from((0, 20)) | numbers),)
    )


block_lists = st.lists(st.integers(1, 3) | st.integers(0, 9), min_size=1, max_size=8)


@settings(max_examples=400)
@given(strange(), st.sampled_from(End), block_lists, block_lists, st.integers(1, 40) | numbers)
def test_every_address_lies_in_a_region(
    theirs: KVLayout, our_end: End, our_blocks: list[int], their_blocks: list[int], end_token: int
) -> None:
    ours = layout(window_tokens=theirs.window_tokens)
    try:
        theirs.validate()
        mapping = map_layouts(ours, theirs, our_end)
        found = describe(
            mapping, [our_blocks], [their_blocks], first_token=0, end_token=end_token, num_tokens=end_token
        )
    except (RemoteProtocolError, Incompatible):
        return
    for side, starts in ((ours, found.our_address), (theirs, found.their_address)):
        spans = [(each.base_address, each.end_address) for each in side.regions]
        for start, num_bytes in zip(starts.tolist(), found.length_bytes.tolist(), strict=True):
            assert num_bytes > 0
            assert any(first <= start and start + num_bytes <= end for first, end in spans)

"""(our layout, a peer's layout) -> how their bytes correspond, prepared once per peer.

Invariant: layers pair by name, heads by their number in the whole layer, tokens by position; names of axis orders play no
part. What is prepared: for every class of layers with the same shapes, the pieces of one *chunk*, the longest run of
tokens that never crosses a row of either side. Next: descriptors.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvbaton.geometry import adjacency
from kvbaton.geometry.adjacency import join
from kvbaton.geometry.compatibility import require_compatible
from kvbaton.geometry.heads import owned_heads
from kvbaton.geometry.layout import KVLayout, Region
from kvbaton.geometry.topology import heads_between
from kvbaton.types import End

Int64Array = adjacency.Int64Array


@dataclass(frozen=True)
class RowShape:
    """How one side of a class of layers finds a token: token `n` of row `r` is at `r * row_stride + n * token_stride`."""

    row_tokens: int
    row_stride_bytes: int
    token_stride_bytes: int


@dataclass(frozen=True)
class LayerClass:
    """Layers whose bytes correspond in the same way.

    The piece `p` of layer `l`'s chunk is at `base[l] + chunk + offset[p]`, where `chunk` is where the chunk's first token
    is in a layer that starts at 0. Bases are int64[num_layers], offsets and lengths int64[num_pieces], in bytes.
    """

    chunk_tokens: int
    our_rows: RowShape
    their_rows: RowShape
    our_base: Int64Array
    their_base: Int64Array
    our_offset: Int64Array
    their_offset: Int64Array
    piece_bytes: Int64Array


@dataclass(frozen=True)
class GroupSide:
    """One side's cache group: its number there, and what its block ids mean."""

    cache_group: int
    block_size_tokens: int
    num_blocks: int


@dataclass(frozen=True)
class GroupPair:
    """Layers that are in this group here and in that group at the peer.

    `window_tokens` is what the destination still needs (0: all).
    """

    ours: GroupSide
    theirs: GroupSide
    window_tokens: int
    classes: tuple[LayerClass, ...]


@dataclass(frozen=True)
class PeerMapping:
    """`pairs` has every (our group, their group) with a layer in common: none twice, and a group may be in several."""

    our_end: End
    pairs: tuple[GroupPair, ...]
    our_num_groups: int
    their_num_groups: int


def alignment_tokens(our_block_sizes: Sequence[int], their_block_sizes: Sequence[int]) -> int:
    """The least number of tokens of which every multiple is a block boundary on both sides, in every cache group."""
    return math.lcm(*our_block_sizes, *their_block_sizes)


def map_layouts(ours: KVLayout, theirs: KVLayout, our_end: End) -> PeerMapping:
    """How the bytes of two valid layouts correspond; `our_end` says which of them is the prefill side.

    Raises Incompatible naming the property in the way, both values and the remedy.
    """
    require_compatible(ours, theirs, our_end)
    their_regions = {region.layer: region for region in theirs.regions}
    grouped: dict[tuple[int, int], list[tuple[Region, Region]]] = {}
    for mine in ours.regions:
        other = their_regions.get(mine.layer)
        if other is not None:
            grouped.setdefault((mine.cache_group, other.cache_group), []).append((mine, other))
    windows = theirs.window_tokens if our_end is End.SOURCE else ours.window_tokens
    pairs = [
        GroupPair(
            ours=_side(ours, our_group, [mine for mine, _ in regions]),
            theirs=_side(theirs, their_group, [other for _, other in regions]),
            window_tokens=windows[their_group if our_end is End.SOURCE else our_group],
            classes=_classes(ours, theirs, our_end, regions),
        )
        for (our_group, their_group), regions in sorted(grouped.items())
    ]
    return PeerMapping(our_end, tuple(pairs), len(ours.block_size_tokens), len(theirs.block_size_tokens))


def _side(layout: KVLayout, group: int, regions: list[Region]) -> GroupSide:
    """A block id is good when every region has that block."""
    block_tokens = layout.block_size_tokens[group]
    return GroupSide(group, block_tokens, min(each.num_rows * each.row_tokens // block_tokens for each in regions))


def _classes(
    ours: KVLayout, theirs: KVLayout, our_end: End, regions: list[tuple[Region, Region]]
) -> tuple[LayerClass, ...]:
    alike: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[Region, Region]]] = {}
    for mine, other in regions:
        alike.setdefault((_shape(mine), _shape(other)), []).append((mine, other))
    found = []
    for members in alike.values():
        mine, other = members[0]
        heads = _heads_between(mine.total_heads, ours, theirs, our_end)
        if heads:
            found.append(
                _fused(
                    _layer_class(
                        members,
                        num_heads=len(heads),
                        our_first_head=heads.start - owned_heads(mine.total_heads, ours.tp_size, ours.tp_rank).start,
                        their_first_head=heads.start
                        - owned_heads(other.total_heads, theirs.tp_size, theirs.tp_rank).start,
                    )
                )
            )
    return tuple(found)


def _shape(region: Region) -> tuple[int, ...]:
    return (
        region.total_heads,
        region.content_bytes,
        region.row_tokens,
        region.row_stride_bytes,
        region.head_stride_bytes,
        region.token_stride_bytes,
    )


def _heads_between(total_heads: int, ours: KVLayout, theirs: KVLayout, our_end: End) -> range:
    prefill, decode = (ours, theirs) if our_end is End.SOURCE else (theirs, ours)
    return heads_between(total_heads, prefill.tp_size, prefill.tp_rank, decode.tp_size, decode.tp_rank)


def _layer_class(
    members: list[tuple[Region, Region]], *, num_heads: int, our_first_head: int, their_first_head: int
) -> LayerClass:
    mine, other = members[0]
    chunk_tokens = math.gcd(mine.row_tokens, other.row_tokens)
    our_cells = _cells(mine, our_first_head, num_heads, chunk_tokens)
    their_cells = _cells(other, their_first_head, num_heads, chunk_tokens)
    our_offset, their_offset, piece_bytes = join(our_cells, their_cells, np.full_like(our_cells, mine.content_bytes))
    members = sorted(members, key=lambda pair: pair[0].base_address)
    return LayerClass(
        chunk_tokens=chunk_tokens,
        our_rows=_rows(mine),
        their_rows=_rows(other),
        our_base=np.array([region.base_address for region, _ in members], dtype=np.int64),
        their_base=np.array([region.base_address for _, region in members], dtype=np.int64),
        our_offset=our_offset,
        their_offset=their_offset,
        piece_bytes=piece_bytes,
    )


def _cells(region: Region, first_head: int, num_heads: int, num_tokens: int) -> Int64Array:
    """int64[num_heads * num_tokens]: where each head of each token of a chunk is, from the chunk's first token on."""
    heads = np.arange(first_head, first_head + num_heads, dtype=np.int64) * region.head_stride_bytes
    tokens = np.arange(num_tokens, dtype=np.int64) * region.token_stride_bytes
    return (heads[:, None] + tokens[None, :]).ravel()


def _rows(region: Region) -> RowShape:
    return RowShape(region.row_tokens, region.row_stride_bytes, region.token_stride_bytes)


def _fused(layers: LayerClass) -> LayerClass:
    """The same bytes; layers whose chunks abut on both sides (blocks outside layers) become one layer with longer pieces.

    Left alone unless it saves half of the pieces: separate layers cost one addition each, pieces are sorted every time.
    """
    our_pieces = ((layers.our_base - layers.our_base[0])[:, None] + layers.our_offset).ravel()
    their_pieces = ((layers.their_base - layers.their_base[0])[:, None] + layers.their_offset).ravel()
    our_offset, their_offset, piece_bytes = join(
        our_pieces, their_pieces, np.tile(layers.piece_bytes, layers.our_base.size)
    )
    if 2 * our_offset.size > our_pieces.size:
        return layers
    return LayerClass(
        chunk_tokens=layers.chunk_tokens,
        our_rows=layers.our_rows,
        their_rows=layers.their_rows,
        our_base=layers.our_base[:1],
        their_base=layers.their_base[:1],
        our_offset=our_offset,
        their_offset=their_offset,
        piece_bytes=piece_bytes,
    )

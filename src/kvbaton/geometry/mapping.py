"""(our layout, a peer's layout) -> what of theirs corresponds to what of ours, prepared as far as it does not depend on blocks.

Regions are paired by layer, never by position; heads by number; tokens by position. Every pair of regions is cut into
*chunks*: the most tokens that never cross a row on either side. The *pieces* of a chunk are its contiguous stretches, the
same for every chunk of regions of the same shape. Made once per peer. Next: descriptors.py.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbaton.errors import Incompatible
from kvbaton.geometry.layout import KVLayout, Region
from kvbaton.geometry.topology import heads_between
from kvbaton.types import End

Int64Array = npt.NDArray[np.int64]
NUM_SHOWN = 4


@dataclass(frozen=True)
class Rows:
    """How tokens of one side's blocks are found: a block is `block_tokens / row_tokens` consecutive rows."""

    block_tokens: int
    row_tokens: int
    row_stride_bytes: int
    token_stride_bytes: int
    num_rows: int


@dataclass(frozen=True)
class RegionClass:
    """Paired regions of the same shape; they differ in their addresses only.

    `our_base`, `their_base`: int64[num_regions]. `our_piece`, `their_piece`, `piece_bytes`: int64[num_pieces], offsets from
    the first token of a chunk.
    """

    chunk_tokens: int
    ours: Rows
    theirs: Rows
    our_base: Int64Array
    their_base: Int64Array
    our_piece: Int64Array
    their_piece: Int64Array
    piece_bytes: Int64Array


@dataclass(frozen=True)
class GroupPair:
    """What one of our cache groups has in common with one of theirs."""

    our_group: int
    their_group: int
    window_tokens: int
    classes: tuple[RegionClass, ...]


@dataclass(frozen=True)
class PeerMapping:
    our_end: End
    num_our_groups: int
    num_their_groups: int
    pairs: tuple[GroupPair, ...]


def map_layouts(ours: KVLayout, theirs: KVLayout, our_end: End) -> PeerMapping:
    """How blocks of `ours` and `theirs` correspond where we are `our_end` of transfers. Raises Incompatible."""
    prefill, decode = (ours, theirs) if our_end is End.SOURCE else (theirs, ours)
    _require_compatible(ours, theirs, prefill, decode)
    their_regions = {region.layer: region for region in theirs.regions}
    pairs: dict[tuple[int, int], list[tuple[Region, Region, range]]] = defaultdict(list)
    for mine in ours.regions:
        other = their_regions.get(mine.layer)
        if other is None:
            continue  # of another pipeline stage
        _require_same_layer(ours, theirs, mine, other)
        heads = heads_between(mine.total_heads, prefill.tp_size, prefill.tp_rank, decode.tp_size, decode.tp_rank)
        if len(heads):
            pairs[mine.cache_group, other.cache_group].append((mine, other, heads))
    our_groups, their_groups = len(ours.block_size_tokens), len(theirs.block_size_tokens)
    return PeerMapping(
        our_end,
        our_groups,
        their_groups,
        tuple(
            GroupPair(mine, other, ours.window_tokens[mine], _classes(ours, theirs, members))
            for (mine, other), members in sorted(pairs.items())
        ),
    )


def _require_compatible(ours: KVLayout, theirs: KVLayout, prefill: KVLayout, decode: KVLayout) -> None:
    """Raises Incompatible naming the first property that differs, with both values: causes before effects."""
    for name, mine, other in (
        ("model", ours.model, theirs.model),
        ("KV cache dtype", ours.dtype, theirs.dtype),
        ("kind of memory", ours.memory_kind, theirs.memory_kind),
        ("number of KV heads", ours.num_kv_heads, theirs.num_kv_heads),
        ("head dimension", ours.head_dim, theirs.head_dim),
    ):
        if mine != other:
            raise _differs(name, mine, other)
    if decode.pp_size > 1:
        raise Incompatible(
            f"the decode engine has pipeline-parallel size {decode.pp_size}; only prefill engines may have stages. Start "
            "the decode engine with pipeline-parallel size 1."
        )
    here, there = _layers(ours), _layers(theirs)
    unpaired = _layers(prefill) - _layers(decode) if prefill.pp_size > 1 else here ^ there
    if unpaired:
        raise _differs("set of layers", sorted(here - there)[:NUM_SHOWN], sorted(there - here)[:NUM_SHOWN])


def _require_same_layer(ours: KVLayout, theirs: KVLayout, mine: Region, other: Region) -> None:
    for name, here, there in (
        ("KV heads", mine.total_heads, other.total_heads),
        ("bytes per head and token", mine.content_bytes, other.content_bytes),
        ("sliding window", ours.window_tokens[mine.cache_group], theirs.window_tokens[other.cache_group]),
    ):
        if here != there:
            raise _differs(f"{name} of layer {mine.layer}", here, there)


def _differs(name: str, mine: object, other: object) -> Incompatible:
    return Incompatible(
        f"{name} differs: {mine} on this engine, {other} on the peer. Start both engines with the same {name}."
    )


def _layers(layout: KVLayout) -> set[str]:
    return {region.layer for region in layout.regions}


def _classes(ours: KVLayout, theirs: KVLayout, members: list[tuple[Region, Region, range]]) -> tuple[RegionClass, ...]:
    """Regions of the same shape together; where whole chunks of them abut on both sides, as if they were one region."""
    by_shape: dict[tuple[object, ...], list[tuple[Region, Region, range]]] = defaultdict(list)
    for mine, other, heads in members:
        by_shape[_shape(mine), _shape(other), heads].append((mine, other, heads))
    classes: list[RegionClass] = []
    for alike in by_shape.values():
        mine, other, heads = alike[0]
        pieces = _pieces(ours, theirs, mine, other, heads)
        bases = sorted((each[0].base_address, each[1].base_address) for each in alike)
        for our_base, their_base, piece_bytes in _fuse(bases, pieces[2]):
            classes.append(
                RegionClass(
                    chunk_tokens=math.gcd(mine.row_tokens, other.row_tokens),
                    ours=_rows(ours, mine),
                    theirs=_rows(theirs, other),
                    our_base=our_base,
                    their_base=their_base,
                    our_piece=pieces[0],
                    their_piece=pieces[1],
                    piece_bytes=piece_bytes,
                )
            )
    return tuple(classes)


def _shape(region: Region) -> tuple[int, ...]:
    return (
        region.num_rows,
        region.row_stride_bytes,
        region.row_tokens,
        region.num_heads,
        region.head_stride_bytes,
        region.token_stride_bytes,
        region.content_bytes,
    )


def _rows(layout: KVLayout, region: Region) -> Rows:
    return Rows(
        block_tokens=layout.block_size_tokens[region.cache_group],
        row_tokens=region.row_tokens,
        row_stride_bytes=region.row_stride_bytes,
        token_stride_bytes=region.token_stride_bytes,
        num_rows=region.num_rows,
    )


def _pieces(
    ours: KVLayout, theirs: KVLayout, mine: Region, other: Region, heads: range
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """One chunk's (our offset, their offset, bytes), as few as possible."""
    tokens = np.arange(math.gcd(mine.row_tokens, other.row_tokens), dtype=np.int64)
    numbers = np.arange(heads.start, heads.stop, dtype=np.int64)

    def offsets(layout: KVLayout, region: Region) -> Int64Array:
        first = layout.tp_rank * region.total_heads // layout.tp_size
        grid = (numbers - first)[:, None] * region.head_stride_bytes + tokens[None, :] * region.token_stride_bytes
        return grid.ravel()

    our_offset, their_offset = offsets(ours, mine), offsets(theirs, other)
    return join(our_offset, their_offset, np.full(our_offset.size, mine.content_bytes, dtype=np.int64))


def join(ours: Int64Array, theirs: Int64Array, length: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The same bytes in as few stretches as possible: those that abut on both sides become one. In order of `ours`."""
    order = np.argsort(ours, kind="stable")
    ours, theirs, length = ours[order], theirs[order], length[order]
    abuts = (ours[:-1] + length[:-1] == ours[1:]) & (theirs[:-1] + length[:-1] == theirs[1:])
    starts = np.concatenate(([0], np.flatnonzero(~abuts) + 1))
    total = np.add.reduceat(length, starts)
    return ours[starts], theirs[starts], total


def _fuse(bases: list[tuple[int, int]], piece_bytes: Int64Array) -> list[tuple[Int64Array, Int64Array, Int64Array]]:
    """(our bases, their bases, bytes of each piece): regions whose every piece abuts the next region's count as one.

    So is vLLM's block-outermost family: all layers of a block in one stretch, or of a head of a block.
    """
    step = int(piece_bytes[0])
    if (piece_bytes != step).any():
        step = 0  # no distance fits all pieces
    runs: list[list[int]] = []  # [our base, their base, number of regions]
    for our_base, their_base in bases:
        if runs and step and (our_base - runs[-1][0], their_base - runs[-1][1]) == (runs[-1][2] * step,) * 2:
            runs[-1][2] += 1
        else:
            runs.append([our_base, their_base, 1])
    fused: dict[int, list[list[int]]] = defaultdict(list)
    for run in runs:
        fused[run[2]].append(run)
    return [
        (
            np.array([run[0] for run in alike], dtype=np.int64),
            np.array([run[1] for run in alike], dtype=np.int64),
            piece_bytes * num_regions,
        )
        for num_regions, alike in fused.items()
    ]

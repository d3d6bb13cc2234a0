"""(our layout, a peer's layout) -> what of theirs corresponds to what of ours, prepared as far as it does not depend on blocks.

Regions are paired by layer, never by position; heads by number; tokens by position. Every pair of regions is cut into
*chunks*: the most tokens that never cross a row on either side. The *pieces* of a chunk are its contiguous stretches, the
same for every chunk at the same place in its row, of all regions of the same shape. Made once per peer. Next: descriptors.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.errors import Incompatible
from kvbaton.geometry.layout import KVLayout, Part, Region
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
    num_rows: int


@dataclass(frozen=True)
class Pieces:
    """A chunk's contiguous stretches; int64[num_pieces] each.

    In chunk `c` of a row, a piece is at `ours + c * our_step` from the beginning of the row; so is it at the peer.
    """

    ours: Int64Array
    theirs: Int64Array
    length_bytes: Int64Array
    our_step: Int64Array
    their_step: Int64Array


@dataclass(frozen=True)
class RegionClass:
    """Paired regions of the same shape; they differ in their addresses only. `our_base`, `their_base`: int64[num_regions]."""

    chunk_tokens: int
    ours: Rows
    theirs: Rows
    our_base: Int64Array
    their_base: Int64Array
    pieces: Pieces


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
        _require_same_layer(ours, theirs, mine, other, our_end)
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
        ("order inside the attention kernel's blocks", ours.packing, theirs.packing),
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


def _require_same_layer(ours: KVLayout, theirs: KVLayout, mine: Region, other: Region, our_end: End) -> None:
    for name, here, there in (
        ("KV heads", mine.total_heads, other.total_heads),
        ("parts of a token", _content(mine), _content(other)),
        ("sliding window", ours.window_tokens[mine.cache_group], theirs.window_tokens[other.cache_group]),
    ):
        if here != there:
            raise _differs(f"{name} of layer {mine.layer}", here, there)
    window = ours.window_tokens[mine.cache_group]
    sizes = ours.block_size_tokens[mine.cache_group], theirs.block_size_tokens[other.cache_group]
    prefill_size, decode_size = sizes if our_end is End.SOURCE else sizes[::-1]
    if window and prefill_size % decode_size:
        # A decode block that the window touches is filled whole, and the prefill engine keeps only what the window touches.
        raise Incompatible(
            f"layer {mine.layer} has a sliding window, and the prefill engine's block size {prefill_size} is not a multiple of "
            f"the decode engine's {decode_size}. Start the decode engine with a block size that divides {prefill_size}."
        )


def _differs(name: str, mine: object, other: object) -> Incompatible:
    return Incompatible(
        f"{name} differs: {mine} on this engine, {other} on the peer. Start both engines with the same {name}."
    )


def _layers(layout: KVLayout) -> set[str]:
    return {region.layer for region in layout.regions}


def _content(region: Region) -> list[tuple[int, int]]:
    """(bytes per token, bytes that stay together) of every part; packed tokens stay together whole."""
    return [
        (part.group_bytes // part.packed_tokens, part.unit_bytes if part.packed_tokens == 1 else 0)
        for part in region.parts
    ]


def _classes(ours: KVLayout, theirs: KVLayout, members: list[tuple[Region, Region, range]]) -> tuple[RegionClass, ...]:
    """Regions of the same shape together; where whole chunks of them abut on both sides, as if they were one region."""
    by_shape: dict[tuple[object, ...], list[tuple[Region, Region, range]]] = defaultdict(list)
    for mine, other, heads in members:
        by_shape[_shape(mine), _shape(other), heads].append((mine, other, heads))
    classes: list[RegionClass] = []
    for alike in by_shape.values():
        mine, other, heads = alike[0]
        chunk_tokens = _chunk_tokens(mine, other)
        pieces = _pieces(ours, theirs, (mine, other), heads, chunk_tokens)
        bases = sorted((each[0].base_address, each[1].base_address) for each in alike)
        for our_base, their_base, num_regions in _fuse(bases, pieces):
            classes.append(
                RegionClass(
                    chunk_tokens=chunk_tokens,
                    ours=_rows(ours, mine),
                    theirs=_rows(theirs, other),
                    our_base=our_base,
                    their_base=their_base,
                    pieces=dataclasses.replace(pieces, length_bytes=pieces.length_bytes * num_regions),
                )
            )
    return tuple(classes)


def _shape(region: Region) -> tuple[object, ...]:
    """All but name, group and address."""
    return msgspec.structs.astuple(region)[3:]


def _chunk_tokens(mine: Region, other: Region) -> int:
    """The most tokens that never cross a row on either side. Raises Incompatible where that would part packed tokens."""
    chunk_tokens = math.gcd(mine.row_tokens, other.row_tokens)
    for here, there in zip(mine.parts, other.parts, strict=True):
        units = [(part.packed_tokens, part.num_units, part.unit_bytes) for part in (here, there)]
        if units[0] != units[1] or chunk_tokens % here.packed_tokens:
            raise Incompatible(
                f"block size differs: {mine.row_tokens} on this engine, {other.row_tokens} on the peer, and the attention "
                f"kernel packs {here.packed_tokens} and {there.packed_tokens} tokens of layer {mine.layer} together. "
                "Start both engines with the same block size."
            )
    return chunk_tokens


def _rows(layout: KVLayout, region: Region) -> Rows:
    return Rows(
        block_tokens=layout.block_size_tokens[region.cache_group],
        row_tokens=region.row_tokens,
        row_stride_bytes=region.row_stride_bytes,
        num_rows=region.num_rows,
    )


def _pieces(
    ours: KVLayout, theirs: KVLayout, regions: tuple[Region, Region], heads: range, chunk_tokens: int
) -> Pieces:
    """The stretches of one chunk, as few as possible: joined within a part, and across parts where a chunk is a row."""
    parts: list[tuple[Int64Array, ...]] = []
    for here, there in zip(regions[0].parts, regions[1].parts, strict=True):
        our_offset = _offsets(ours, regions[0], here, heads, chunk_tokens)
        their_offset = _offsets(theirs, regions[1], there, heads, chunk_tokens)
        joined = join(our_offset, their_offset, np.full(our_offset.size, here.unit_bytes, dtype=np.int64))
        num_groups = chunk_tokens // here.packed_tokens
        steps = (
            np.full(joined[0].size, num_groups * part.group_stride_bytes, dtype=np.int64) for part in (here, there)
        )
        parts.append((*joined, *steps))
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    if chunk_tokens == regions[0].row_tokens == regions[1].row_tokens:
        joined = join(*columns[:3])
        return Pieces(*joined, *(np.zeros(joined[0].size, dtype=np.int64) for _ in range(2)))
    return Pieces(*columns)


def _offsets(layout: KVLayout, region: Region, part: Part, heads: range, num_tokens: int) -> Int64Array:
    """Of every unit of every group of every head of a row's first tokens, from the beginning of the row."""
    first = layout.tp_rank * region.total_heads // layout.tp_size
    numbers = np.arange(heads.start - first, heads.stop - first, dtype=np.int64) * region.head_stride_bytes
    groups = np.arange(num_tokens // part.packed_tokens, dtype=np.int64) * part.group_stride_bytes
    units = np.arange(part.num_units, dtype=np.int64) * part.unit_stride_bytes
    return part.offset_bytes + (numbers[:, None, None] + groups[None, :, None] + units[None, None, :]).ravel()


def join(ours: Int64Array, theirs: Int64Array, length: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The same bytes in as few stretches as possible: those that abut on both sides become one. In order of `ours`."""
    order = np.argsort(ours, kind="stable")
    ours, theirs, length = ours[order], theirs[order], length[order]
    abuts = (ours[:-1] + length[:-1] == ours[1:]) & (theirs[:-1] + length[:-1] == theirs[1:])
    starts = np.concatenate(([0], np.flatnonzero(~abuts) + 1))
    total = np.add.reduceat(length, starts)
    return ours[starts], theirs[starts], total


def _fuse(bases: list[tuple[int, int]], pieces: Pieces) -> list[tuple[Int64Array, Int64Array, int]]:
    """(our bases, their bases, how many regions each stands for): regions whose every piece abuts the next one's are one.

    So is vLLM's block-outermost family: all layers of a block in one stretch, or of a head of a block.
    """
    lengths = set(pieces.length_bytes.tolist())
    step = lengths.pop() if len(lengths) == 1 else None  # no distance fits pieces of several lengths
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
            num_regions,
        )
        for num_regions, alike in fused.items()
    ]

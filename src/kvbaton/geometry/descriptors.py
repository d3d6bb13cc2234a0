"""Block ids -> address arrays, with neighbours joined on both sides. Arithmetic only, vectorised over chunks and regions.

Invariant: the set of (our byte, their byte) pairs described equals the one asked for; joining changes only how many
descriptors say it. Blocks pair by the position of their tokens, so the two lists may be in different block sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvbaton.errors import RemoteProtocolError
from kvbaton.geometry.mapping import Int64Array, PeerMapping, RegionClass, Rows, join
from kvbaton.types import End


@dataclass(frozen=True)
class Descriptors:
    """int64[num_descriptors] each: where bytes are here, where they are at the peer, and how many."""

    our_address: Int64Array
    their_address: Int64Array
    length_bytes: Int64Array

    @property
    def num_descriptors(self) -> int:
        return int(self.length_bytes.size)

    @property
    def num_bytes(self) -> int:
        return int(self.length_bytes.sum())


def alignment_tokens(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """A multiple of every cache group's block size on both sides: where a prompt may be cut without cutting a block."""
    return math.lcm(*ours, *theirs)


def describe(
    mapping: PeerMapping,
    our_blocks: Sequence[Sequence[int]],
    their_blocks: Sequence[Sequence[int]],
    *,
    first_token: int,
    end_token: int,
    num_tokens: int,
) -> Descriptors:
    """Descriptors for the KV of tokens [first_token, end_token) of a prompt of `num_tokens`.

    The lists hold one side's block ids per cache group of that side, from token 0 on. `first_token` is on a block boundary
    of the destination; a block that `end_token` leaves unfinished is moved as far as it is shared. Block 0 is vLLM's null
    block: nothing is wanted there, and nothing can be had from it. Raises RemoteProtocolError when an id lies outside its
    regions, a list is too short, or the source lacks what the destination needs.
    """
    for whose, lists, num_groups in (
        ("our", our_blocks, mapping.num_our_groups),
        ("the peer's", their_blocks, mapping.num_their_groups),
    ):
        if len(lists) != num_groups:
            raise RemoteProtocolError(f"{whose} block lists are for {len(lists)} cache groups; expected {num_groups}")
    parts: list[_InAnyRegion] = []
    for pair in mapping.pairs if first_token < end_token else ():
        ours = np.asarray(our_blocks[pair.our_group], dtype=np.int64)
        theirs = np.asarray(their_blocks[pair.their_group], dtype=np.int64)
        needed_from = max(0, num_tokens - pair.window_tokens) if pair.window_tokens else 0
        for alike in pair.classes:
            _check(ours, alike.ours, end_token, "our")
            _check(theirs, alike.theirs, end_token, "the peer's")
            starts = _chunk_starts(alike, first_token, end_token)
            ids = ours[starts // alike.ours.block_tokens], theirs[starts // alike.theirs.block_tokens]
            at_source, at_destination = ids if mapping.our_end is End.SOURCE else ids[::-1]
            destination = alike.theirs if mapping.our_end is End.SOURCE else alike.ours
            starts = _wanted(destination, at_source, at_destination, starts, needed_from)
            if starts.size:
                parts.append(_describe_class(alike, ours, theirs, starts))
    return _in_every_region(parts)


def _chunk_starts(alike: RegionClass, first_token: int, end_token: int) -> Int64Array:
    """First tokens of the chunks that hold [first_token, end_token)."""
    chunk = alike.chunk_tokens
    if first_token % chunk:
        raise RemoteProtocolError(f"token {first_token} is not where a block of {chunk} tokens begins")
    return np.arange(first_token, end_token, chunk, dtype=np.int64)


def _check(blocks: Int64Array, rows: Rows, end_token: int, whose: str) -> None:
    num_needed = -(-end_token // rows.block_tokens)
    if blocks.size < num_needed:
        raise RemoteProtocolError(
            f"{whose} {blocks.size} blocks of {rows.block_tokens} tokens cannot hold token {end_token - 1}"
        )
    num_blocks = rows.num_rows * rows.row_tokens // rows.block_tokens
    if blocks.size and (int(blocks.min()) < 0 or int(blocks.max()) >= num_blocks):
        raise RemoteProtocolError(
            f"{whose} block ids span {int(blocks.min())} to {int(blocks.max())}; the registered cache has "
            f"{num_blocks} blocks"
        )


def _wanted(
    destination: Rows,
    at_source: Int64Array,
    at_destination: Int64Array,
    starts: Int64Array,
    needed_from: int,
) -> Int64Array:
    """The chunks that have a place at the destination; the block ids at both sides are those of the chunks.

    A destination's block that holds a needed token is filled whole: its engine may keep it for other prompts.
    Raises RemoteProtocolError when the source lacks one that the destination needs.
    """
    block_end = (starts // destination.block_tokens + 1) * destination.block_tokens
    is_lacking = (at_destination != 0) & (at_source == 0) & (block_end > needed_from)
    if is_lacking.any():
        raise RemoteProtocolError(
            f"the prefill side no longer holds token {int(starts[is_lacking][0])}, which the decode side needs"
        )
    wanted: Int64Array = starts[(at_source != 0) & (at_destination != 0)]
    return wanted


@dataclass(frozen=True)
class _InAnyRegion:
    """What is moved in each region of a class, int64[num_pieces] each, from its base address on."""

    alike: RegionClass
    our_offset: Int64Array
    their_offset: Int64Array
    length_bytes: Int64Array


def _describe_class(alike: RegionClass, ours: Int64Array, theirs: Int64Array, starts: Int64Array) -> _InAnyRegion:
    """The chunks that begin at these tokens, joined."""
    pieces = alike.pieces
    our_row, our_chunk = _rows_of(alike.ours, ours, starts, alike.chunk_tokens)
    their_row, their_chunk = _rows_of(alike.theirs, theirs, starts, alike.chunk_tokens)
    our_offset = (our_row[:, None] + our_chunk[:, None] * pieces.our_step + pieces.ours).ravel()
    their_offset = (their_row[:, None] + their_chunk[:, None] * pieces.their_step + pieces.theirs).ravel()
    return _InAnyRegion(alike, *join(our_offset, their_offset, np.tile(pieces.length_bytes, starts.size)))


def _in_every_region(parts: list[_InAnyRegion]) -> Descriptors:
    """All regions of all classes, region by region; every number is written once."""
    num_descriptors = sum(part.alike.our_base.size * part.length_bytes.size for part in parts)
    our_address, their_address, length_bytes = (np.empty(num_descriptors, dtype=np.int64) for _ in range(3))
    begin = 0
    for part in parts:
        shape = part.alike.our_base.size, part.length_bytes.size
        end = begin + shape[0] * shape[1]
        np.add(part.alike.our_base[:, None], part.our_offset, out=our_address[begin:end].reshape(shape))
        np.add(part.alike.their_base[:, None], part.their_offset, out=their_address[begin:end].reshape(shape))
        length_bytes[begin:end].reshape(shape)[:] = part.length_bytes
        begin = end
    return Descriptors(our_address, their_address, length_bytes)


def _rows_of(rows: Rows, blocks: Int64Array, starts: Int64Array, chunk_tokens: int) -> tuple[Int64Array, Int64Array]:
    """(where the rows of the chunks begin, from a region's base address on; which chunk of its row each of them is)."""
    rows_per_block = rows.block_tokens // rows.row_tokens
    row = blocks[starts // rows.block_tokens] * rows_per_block + starts % rows.block_tokens // rows.row_tokens
    return row * rows.row_stride_bytes, starts % rows.row_tokens // chunk_tokens

"""Block ids -> address arrays, with neighbours merged on both sides. Arithmetic only, vectorised over chunks and layers.

Invariant: the set of (our byte, their byte) pairs described is that of the tokens asked for, rounded outwards to chunks;
merging changes only how many descriptors say it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvbaton.errors import RemoteProtocolError
from kvbaton.geometry.adjacency import Int64Array, join
from kvbaton.geometry.mapping import GroupPair, GroupSide, LayerClass, PeerMapping, RowShape
from kvbaton.types import End

BlockLists = Sequence[Sequence[int]]
MAX_TOKEN = 1 << 62
NULL_BLOCK = 0
"""vLLM's placeholder where a sliding window has passed: a block that holds nothing."""


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


def describe(
    mapping: PeerMapping,
    our_blocks: BlockLists,
    their_blocks: BlockLists,
    *,
    first_token: int,
    end_token: int,
    num_tokens: int,
) -> Descriptors:
    """Descriptors for moving tokens [first_token, end_token) of a prompt of `num_tokens`.

    Block lists are per cache group, in each side's own numbering and block size, in token order from token 0. The range
    is rounded outwards to chunks. A destination's null block receives nothing; a source's is an error, unless the
    destination's block lies wholly before the sliding window.
    Raises RemoteProtocolError when an id lies outside its regions, or a list is too short or holds too little.
    """
    if (len(our_blocks), len(their_blocks)) != (mapping.our_num_groups, mapping.their_num_groups):
        raise RemoteProtocolError(
            f"block lists for {len(our_blocks)} cache groups here and {len(their_blocks)} at the peer; expected "
            f"{mapping.our_num_groups} and {mapping.their_num_groups}"
        )
    parts: list[_Part] = []
    for pair in mapping.pairs if first_token < end_token else ():
        ours = _Blocks("our", pair.ours, our_blocks[pair.ours.cache_group], first_token, end_token)
        theirs = _Blocks("the peer's", pair.theirs, their_blocks[pair.theirs.cache_group], first_token, end_token)
        for layers in pair.classes:
            tokens = np.arange(first_token // layers.chunk_tokens * layers.chunk_tokens, end_token, layers.chunk_tokens)
            tokens = tokens[_moves(mapping.our_end, pair, ours, theirs, tokens, num_tokens)]
            if tokens.size:
                chunks = ours.locate(tokens, layers.our_rows), theirs.locate(tokens, layers.their_rows)
                parts.append(_part(layers, *chunks))
    return _in_every_layer(parts)


class _Blocks:
    """One side's blocks of one cache group, checked, for the tokens of one call."""

    def __init__(self, whose: str, side: GroupSide, blocks: Sequence[int], first_token: int, end_token: int) -> None:
        size = side.block_size_tokens
        if len(blocks) * size < end_token:
            raise RemoteProtocolError(
                f"{whose} {len(blocks)} blocks of {size} tokens cannot hold token {end_token - 1} (cache group "
                f"{side.cache_group})"
            )
        self.size_tokens = size
        self._first = first_token // size
        self._ids = np.array(blocks[self._first : -(-end_token // size)], dtype=np.int64)
        lowest, highest = int(self._ids.min()), int(self._ids.max())
        if lowest < 0 or highest >= side.num_blocks:
            raise RemoteProtocolError(
                f"{whose} block ids span {lowest} to {highest}; the registered cache has {side.num_blocks} blocks "
                f"(cache group {side.cache_group})"
            )

    def ids(self, tokens: Int64Array) -> Int64Array:
        """int64[num_tokens]: the block that holds each token."""
        return self._ids[tokens // self.size_tokens - self._first]

    def locate(self, tokens: Int64Array, rows: RowShape) -> Int64Array:
        """int64[num_tokens]: bytes from a layer's base to each token."""
        row = (self.ids(tokens) * self.size_tokens + tokens % self.size_tokens) // rows.row_tokens
        return row * rows.row_stride_bytes + tokens % rows.row_tokens * rows.token_stride_bytes


def _moves(
    our_end: End, pair: GroupPair, ours: _Blocks, theirs: _Blocks, tokens: Int64Array, num_tokens: int
) -> np.typing.NDArray[np.bool_]:
    """bool[num_chunks]: which of the chunks that start at these tokens have bytes to move.

    A destination block that the window still touches must be filled whole: its engine may keep it for other prompts.
    """
    source, destination = (ours, theirs) if our_end is End.SOURCE else (theirs, ours)
    wanted, offered = destination.ids(tokens) != NULL_BLOCK, source.ids(tokens) != NULL_BLOCK
    window_start = min(max(0, num_tokens - pair.window_tokens), MAX_TOKEN) if pair.window_tokens else 0
    block_end = (tokens // destination.size_tokens + 1) * destination.size_tokens
    missing = wanted & ~offered & (block_end > window_start)
    if missing.any():
        raise RemoteProtocolError(
            f"the source's block for token {int(tokens[missing][0])} in our cache group {pair.ours.cache_group} is gone, "
            "and the destination needs it"
        )
    moves: np.typing.NDArray[np.bool_] = wanted & offered
    return moves


@dataclass(frozen=True)
class _Part:
    """Joined pieces of one class, int64[num_pieces] each, from the base of any of its layers."""

    layers: LayerClass
    our_offset: Int64Array
    their_offset: Int64Array
    piece_bytes: Int64Array


def _part(layers: LayerClass, our_chunk: Int64Array, their_chunk: Int64Array) -> _Part:
    """Every piece of the chunks that start at these offsets."""
    joined = join(
        (our_chunk[:, None] + layers.our_offset).ravel(),
        (their_chunk[:, None] + layers.their_offset).ravel(),
        np.tile(layers.piece_bytes, our_chunk.size),
    )
    return _Part(layers, *joined)


def _in_every_layer(parts: list[_Part]) -> Descriptors:
    """The parts' pieces in all of their layers, layer by layer; each number is written once."""
    num_descriptors = sum(part.layers.our_base.size * part.piece_bytes.size for part in parts)
    our_address, their_address, length_bytes = (np.empty(num_descriptors, dtype=np.int64) for _ in range(3))
    start = 0
    for part in parts:
        shape = part.layers.our_base.size, part.piece_bytes.size
        end = start + shape[0] * shape[1]
        np.add(part.layers.our_base[:, None], part.our_offset, out=our_address[start:end].reshape(shape))
        np.add(part.layers.their_base[:, None], part.their_offset, out=their_address[start:end].reshape(shape))
        length_bytes[start:end].reshape(shape)[:] = part.piece_bytes
        start = end
    return Descriptors(our_address, their_address, length_bytes)

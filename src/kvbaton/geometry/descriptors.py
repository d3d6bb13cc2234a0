"""Block ids -> address arrays, with neighbours merged on both sides. Arithmetic only, vectorised over blocks and regions.

Invariant: the set of (our byte, their byte) pairs described equals the one asked for; merging changes only how many
descriptors say it. Merging needs runs of ids that go up, or down, together on both sides, in regions whose blocks abut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvbaton.errors import RemoteProtocolError
from kvbaton.geometry.mapping import GroupMapping, Int64Array, PeerMapping


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


def block_range(first_token: int, end_token: int, block_size_tokens: int, *, whole_blocks_only: bool) -> range:
    """Indices of the blocks that hold tokens [first_token, end_token).

    `first_token` must lie on a block boundary of the streamed part. With `whole_blocks_only` a block that `end_token`
    leaves unfinished is left for later.
    """
    first = first_token // block_size_tokens
    end = end_token // block_size_tokens if whole_blocks_only else -(-end_token // block_size_tokens)
    return range(first, max(first, end))


def _describe(
    mapping: PeerMapping, our_blocks: Sequence[Sequence[int]], their_blocks: Sequence[Sequence[int]]
) -> Descriptors:
    """Descriptors for copying, per cache group, our block `i` of the list against their block `i`.

    Block 0 is vLLM's null block: a pair in which either side is null (outside a sliding window) moves nothing.
    Raises RemoteProtocolError when an id lies outside its regions or the lists do not pair up.
    """
    if not len(our_blocks) == len(their_blocks) == len(mapping.groups):
        raise RemoteProtocolError(
            f"block lists for {len(our_blocks)} and {len(their_blocks)} cache groups; expected {len(mapping.groups)}"
        )
    parts = [
        _describe_group(group, np.asarray(ours, dtype=np.int64), np.asarray(theirs, dtype=np.int64))
        for group, ours, theirs in zip(mapping.groups, our_blocks, their_blocks, strict=True)
    ]
    return Descriptors(
        our_address=np.concatenate([part.our_address for part in parts]),
        their_address=np.concatenate([part.their_address for part in parts]),
        length_bytes=np.concatenate([part.length_bytes for part in parts]),
    )


def _describe_group(group: GroupMapping, ours: Int64Array, theirs: Int64Array) -> Descriptors:
    if ours.shape != theirs.shape:
        raise RemoteProtocolError(f"{ours.size} blocks here cannot pair with {theirs.size} blocks at the peer")
    _check_ids(ours, group.our_num_blocks, "our")
    _check_ids(theirs, group.their_num_blocks, "the peer's")
    real = (ours != 0) & (theirs != 0)
    ours, theirs = ours[real], theirs[real]
    if ours.size == 0:
        empty = np.empty(0, dtype=np.int64)
        return Descriptors(empty, empty, empty)
    abuts = (group.our_stride == group.block_bytes) & (group.their_stride == group.block_bytes)
    merged = _address(group, abuts, *_runs(ours, theirs))
    ones = np.ones(ours.size, dtype=np.int64)
    single = _address(group, ~abuts, ours, theirs, ones)
    return Descriptors(*(np.concatenate(pair) for pair in zip(merged, single, strict=True)))


def _check_ids(ids: Int64Array, num_blocks: int, whose: str) -> None:
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= num_blocks):
        raise RemoteProtocolError(
            f"{whose} block ids span {int(ids.min())} to {int(ids.max())}; the registered cache has {num_blocks} blocks"
        )


def _runs(ours: Int64Array, theirs: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Maximal runs in which both ids step by +1 together, or by -1 together: (our first, their first, length).

    A run that goes down is reported by its lowest ids, because it covers the same bytes as the one that goes up.
    Example: ours 5 6 7 9 8, theirs 1 2 3 7 6 -> (5, 1, 3) and (8, 6, 2).
    """
    our_step, their_step = np.diff(ours), np.diff(theirs)
    joins = (our_step == their_step) & (np.abs(our_step) == 1)
    # A join continues a run only when it goes the way the run's previous join went; where two joins of opposite
    # direction meet (5 6 5) the later one starts a run of its own, at the element after the shared one.
    step = np.where(joins, our_step, 0)
    turned = np.zeros(joins.size, dtype=bool)
    turned[1:] = (step[1:] != 0) & (step[:-1] != 0) & (step[1:] != step[:-1])
    starts = np.concatenate(([0], np.flatnonzero(~joins | turned) + 1))
    ends = np.concatenate((starts[1:], [ours.size]))
    first_our = np.minimum(ours[starts], ours[ends - 1])
    first_their = np.minimum(theirs[starts], theirs[ends - 1])
    return first_our, first_their, ends - starts


def _address(
    group: GroupMapping, chosen: np.typing.NDArray[np.bool_], ours: Int64Array, theirs: Int64Array, count: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Addresses of `count` blocks from the given first ids on, in every chosen region; flattened region by region."""
    our_address = group.our_base[chosen, None] + ours[None, :] * group.our_stride[chosen, None]
    their_address = group.their_base[chosen, None] + theirs[None, :] * group.their_stride[chosen, None]
    length_bytes = group.block_bytes[chosen, None] * count[None, :]
    return our_address.ravel(), their_address.ravel(), length_bytes.ravel()


def alignment_tokens(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    import math

    return math.lcm(*a, *b)


def describe(mapping, our_blocks, their_blocks, *, first_token, end_token, num_tokens):
    sizes = mapping.block_size_tokens

    def sl(lists):
        if len(lists) != len(sizes):
            raise RemoteProtocolError(f"block lists for {len(lists)} cache groups; expected {len(sizes)}")
        parts = []
        for blocks, size in zip(lists, sizes):
            wanted = block_range(first_token, end_token, size, whole_blocks_only=False)
            if len(blocks) < wanted.stop:
                raise RemoteProtocolError(f"{len(blocks)} blocks of {size} tokens cannot hold token {end_token - 1}")
            parts.append(blocks[wanted.start : wanted.stop])
        return parts

    return _describe(mapping, sl(our_blocks), sl(their_blocks))

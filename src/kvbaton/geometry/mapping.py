"""(our layout, a peer's layout) -> which of our regions corresponds to which of theirs. Made once per peer.

Invariant: the pairing is by layer name, never by list position. Today both sides must agree in everything but addresses
and strides (`layout.require_compatible`); unequal sizes become further strategies here. Next: descriptors.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbaton.geometry.layout import KVLayout, Region, require_compatible

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class GroupMapping:
    """The paired regions of one cache group; arrays are int64[num_regions], addresses and strides in bytes."""

    our_base: Int64Array
    our_stride: Int64Array
    their_base: Int64Array
    their_stride: Int64Array
    block_bytes: Int64Array
    our_num_blocks: int
    their_num_blocks: int


@dataclass(frozen=True)
class PeerMapping:
    groups: tuple[GroupMapping, ...]
    block_size_tokens: tuple[int, ...]


def map_layouts(ours: KVLayout, theirs: KVLayout, our_end: object = None) -> PeerMapping:
    """How blocks of `ours` and `theirs` correspond. Raises Incompatible when they cannot."""
    require_compatible(ours, theirs)
    their_regions = {region.layer: region for region in theirs.regions}
    groups = []
    for group in range(len(ours.block_size_tokens)):
        mine = [region for region in ours.regions if region.cache_group == group]
        groups.append(_pair(mine, [their_regions[region.layer] for region in mine]))
    return PeerMapping(groups=tuple(groups), block_size_tokens=ours.block_size_tokens)


def _pair(mine: list[Region], theirs: list[Region]) -> GroupMapping:
    return GroupMapping(
        our_base=np.array([region.base_address for region in mine], dtype=np.int64),
        our_stride=np.array([region.block_stride_bytes for region in mine], dtype=np.int64),
        their_base=np.array([region.base_address for region in theirs], dtype=np.int64),
        their_stride=np.array([region.block_stride_bytes for region in theirs], dtype=np.int64),
        block_bytes=np.array([region.block_bytes for region in mine], dtype=np.int64),
        our_num_blocks=min((region.num_blocks for region in mine), default=0),
        their_num_blocks=min((region.num_blocks for region in theirs), default=0),
    )

"""One rank's KV cache as plain data: regions, strides, block size, and what must match on the other side.

Invariant: a layout is complete. Everything a peer needs to address this rank's blocks is in it, and nothing about how
it was made. Next: mapping.py.
"""

from __future__ import annotations

import msgspec

from kvbaton.errors import Incompatible, RemoteProtocolError

MAX_REGIONS = 4096
MAX_ADDRESS = 1 << 63
MAX_DEVICES = 1 << 16
NUM_SHOWN = 4


class Region(msgspec.Struct, frozen=True, array_like=True):
    """One layer's contiguous span: block `b` starts at `base_address + b * block_stride_bytes`."""

    layer: str
    cache_group: int
    base_address: int
    block_stride_bytes: int
    block_bytes: int
    num_blocks: int

    @property
    def end_address(self) -> int:
        return self.base_address + (self.num_blocks - 1) * self.block_stride_bytes + self.block_bytes


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer must know of one rank's KV cache.

    `block_size_tokens` has one entry per cache group. `axis_order` is the order of layer, block, head, token and content
    axes in vLLM's letters (LBNHC and relatives), outermost first.
    """

    regions: tuple[Region, ...]
    block_size_tokens: tuple[int, ...]
    memory_kind: str
    device_id: int
    model: str
    dtype: str
    num_kv_heads: int
    head_dim: int
    axis_order: str
    tp_size: int
    tp_rank: int
    pp_size: int

    def validate(self) -> None:
        """Raises RemoteProtocolError when the layout contradicts itself; a peer's layout is checked before it is used."""
        if not 0 < len(self.regions) <= MAX_REGIONS:
            raise RemoteProtocolError(f"layout has {len(self.regions)} regions; expected 1 to {MAX_REGIONS}")
        if not self.block_size_tokens or min(self.block_size_tokens) < 1:
            raise RemoteProtocolError(f"layout has block sizes {self.block_size_tokens}; expected positive numbers")
        if self.tp_size < 1 or not 0 <= self.tp_rank < self.tp_size:
            raise RemoteProtocolError(f"layout has tensor-parallel rank {self.tp_rank} of {self.tp_size}")
        if not 0 <= self.device_id < MAX_DEVICES:
            raise RemoteProtocolError(f"layout has device {self.device_id}; expected 0 to {MAX_DEVICES - 1}")
        layers = [region.layer for region in self.regions]
        if len(set(layers)) != len(layers):
            raise RemoteProtocolError("layout names a layer twice")
        for region in self.regions:
            _validate_region(region, num_groups=len(self.block_size_tokens))


def _validate_region(region: Region, *, num_groups: int) -> None:
    sane = (
        0 <= region.cache_group < num_groups
        and 0 < region.block_bytes <= region.block_stride_bytes < MAX_ADDRESS
        and region.num_blocks > 0
        and region.base_address > 0
        and region.end_address < MAX_ADDRESS
    )
    if not sane:
        raise RemoteProtocolError(f"layout region {region.layer!r} is not addressable: {region}")


def require_compatible(ours: KVLayout, theirs: KVLayout) -> None:
    """Blocks of the two layouts can be copied one to one.

    Raises Incompatible naming the first property that differs, with both values.
    """
    for name, mine, other in _comparable(ours, theirs):
        if mine != other:
            raise Incompatible(
                f"{name} differs: {mine} on this engine, {other} on the peer. Start both engines with the same {name}."
            )


def _comparable(ours: KVLayout, theirs: KVLayout) -> list[tuple[str, object, object]]:
    """(property, our value, their value) in the order in which they should be reported: causes before effects."""
    mine, other = _layers(ours), _layers(theirs)
    return [
        ("model", ours.model, theirs.model),
        ("KV cache dtype", ours.dtype, theirs.dtype),
        ("kind of memory", ours.memory_kind, theirs.memory_kind),
        ("tensor-parallel size", ours.tp_size, theirs.tp_size),
        ("tensor-parallel rank", ours.tp_rank, theirs.tp_rank),
        ("pipeline-parallel size", ours.pp_size, theirs.pp_size),
        ("block size", list(ours.block_size_tokens), list(theirs.block_size_tokens)),
        ("number of KV heads per rank", ours.num_kv_heads, theirs.num_kv_heads),
        ("head dimension", ours.head_dim, theirs.head_dim),
        ("KV cache axis order", ours.axis_order, theirs.axis_order),
        ("set of layers", sorted(mine - other)[:NUM_SHOWN], sorted(other - mine)[:NUM_SHOWN]),
    ]


def _layers(layout: KVLayout) -> set[tuple[str, int, int]]:
    """(name, cache group, bytes per block) of every layer."""
    return {(region.layer, region.cache_group, region.block_bytes) for region in layout.regions}


def bytes_per_token(layout: KVLayout) -> int:
    return max(1, sum(r.block_bytes for r in layout.regions) // layout.block_size_tokens[0])

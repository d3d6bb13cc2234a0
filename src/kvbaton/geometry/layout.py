"""One rank's KV cache as plain data: where every layer's heads and tokens are, and what must match on the other side.

Invariant: a layout is complete. Everything a peer needs to address this rank's blocks is in it, and nothing about how
it was made. The axis order is nothing but a choice of strides. Next: topology.py, mapping.py.
"""

from __future__ import annotations

import msgspec

from kvbaton.errors import RemoteProtocolError

MAX_REGIONS = 4096
MAX_ADDRESS = 1 << 63
MAX_DEVICES = 1 << 16
MAX_RANKS = 4096
MAX_ROW_ELEMENTS = 1 << 18
MAX_HEADS = 1 << 16


class Region(msgspec.Struct, frozen=True, array_like=True):
    """One layer on one rank, as a strided array of rows x heads x tokens x content bytes.

    A row is what the attention kernel calls a block: `row_tokens` tokens. Row `r`, head `h`, token `t` is at
    `base_address + r * row_stride_bytes + h * head_stride_bytes + t * token_stride_bytes`.
    """

    layer: str
    cache_group: int
    base_address: int
    num_rows: int
    row_stride_bytes: int
    row_tokens: int
    num_heads: int
    """On this rank."""
    total_heads: int
    """Of the layer over all tensor-parallel ranks; 1 for a latent cache."""
    head_stride_bytes: int
    token_stride_bytes: int
    content_bytes: int
    """Contiguous bytes of one head of one token."""

    @property
    def row_end_bytes(self) -> int:
        """From a row's address to behind its last byte."""
        heads, tokens = (self.num_heads - 1) * self.head_stride_bytes, (self.row_tokens - 1) * self.token_stride_bytes
        return heads + tokens + self.content_bytes

    @property
    def end_address(self) -> int:
        return self.base_address + (self.num_rows - 1) * self.row_stride_bytes + self.row_end_bytes


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer must know of one rank's KV cache.

    `block_size_tokens` and `window_tokens` have one entry per cache group; a window of 0 means that all tokens are needed.
    `axis_order` (vLLM's letters, LBNHC and relatives, outermost first) is only there to be read by people.
    """

    regions: tuple[Region, ...]
    block_size_tokens: tuple[int, ...]
    window_tokens: tuple[int, ...]
    memory_kind: str
    device_id: int
    model: str
    dtype: str
    num_kv_heads: int
    """Of the whole model."""
    head_dim: int
    axis_order: str
    tp_size: int
    tp_rank: int
    pp_size: int
    pp_rank: int

    def validate(self) -> None:
        """Raises RemoteProtocolError when the layout contradicts itself; a peer's layout is checked before it is used."""
        if not 0 < len(self.regions) <= MAX_REGIONS:
            raise RemoteProtocolError(f"layout has {len(self.regions)} regions; expected 1 to {MAX_REGIONS}")
        num_groups = len(self.block_size_tokens)
        if not 0 < num_groups <= MAX_REGIONS or len(self.window_tokens) != num_groups:
            raise RemoteProtocolError(f"layout has {num_groups} block sizes and {len(self.window_tokens)} windows")
        if not all(0 < size <= MAX_ROW_ELEMENTS for size in self.block_size_tokens) or min(self.window_tokens) < 0:
            raise RemoteProtocolError(f"layout has block sizes {self.block_size_tokens}, windows {self.window_tokens}")
        self._validate_ranks()
        if not 0 <= self.device_id < MAX_DEVICES:
            raise RemoteProtocolError(f"layout has device {self.device_id}; expected 0 to {MAX_DEVICES - 1}")
        layers = [region.layer for region in self.regions]
        if len(set(layers)) != len(layers):
            raise RemoteProtocolError("layout names a layer twice")
        for region in self.regions:
            self._validate_region(region)

    def _validate_ranks(self) -> None:
        for what, rank, size in (("tensor", self.tp_rank, self.tp_size), ("pipeline", self.pp_rank, self.pp_size)):
            if not 0 <= rank < size <= MAX_RANKS:
                raise RemoteProtocolError(f"layout has {what}-parallel rank {rank} of {size}")

    def _validate_region(self, region: Region) -> None:
        sane = (
            0 <= region.cache_group < len(self.block_size_tokens)
            and region.num_rows > 0
            and region.row_tokens > 0
            and self.block_size_tokens[region.cache_group] % region.row_tokens == 0
            and 0 < region.num_heads <= region.total_heads <= MAX_HEADS
            and region.num_heads * region.row_tokens <= MAX_ROW_ELEMENTS
            and 0 < region.content_bytes <= min(region.head_stride_bytes, region.token_stride_bytes)
            and max(region.row_stride_bytes, region.head_stride_bytes, region.token_stride_bytes) < MAX_ADDRESS
            and region.row_stride_bytes >= region.content_bytes
            and 0 < region.base_address < region.end_address < MAX_ADDRESS
        )
        if not sane:
            raise RemoteProtocolError(f"layout region {region.layer!r} is not addressable: {region}")


def bytes_per_token(layout: KVLayout) -> int:
    """Of one token's KV in all layers of this rank."""
    return sum(region.num_heads * region.content_bytes for region in layout.regions)

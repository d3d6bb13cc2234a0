"""One rank's KV cache as plain data: where every layer's heads and tokens are, and what must match on the other side.

Invariant: a layout is complete. Everything a peer needs to address this rank's blocks is in it, and nothing about how
it was made. The axis order is nothing but a choice of strides. Next: topology.py, mapping.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvbaton.errors import RemoteProtocolError
from kvbaton.geometry.heads import owned_heads

MAX_REGIONS = 4096
MAX_ADDRESS = 1 << 63
MAX_DEVICES = 1 << 16
MAX_RANKS = 4096
MAX_BLOCK_TOKENS = 1 << 18
MAX_ROW_PIECES = 1 << 18
MAX_PARTS = 8
MAX_BLOCKS = 1 << 31
MAX_HEADS = 1 << 16


class Part(msgspec.Struct, frozen=True, array_like=True):
    """What one head holds of every token, or a part of it that is laid out by itself (keys apart from values).

    `packed_tokens` consecutive tokens are inseparable: they are a group at `offset_bytes + group * group_stride_bytes`. A
    group is `num_units` stretches of `unit_bytes`, `unit_stride_bytes` apart. In the plain case a group is one token and
    one stretch; keys that are stored transposed are many units of one element each.
    """

    offset_bytes: int
    packed_tokens: int
    group_stride_bytes: int
    num_units: int
    unit_stride_bytes: int
    unit_bytes: int

    @property
    def group_bytes(self) -> int:
        return self.num_units * self.unit_bytes

    def end_bytes(self, num_tokens: int) -> int:
        """From a head's address to behind the last byte of its `num_tokens` tokens."""
        last_group = (num_tokens // self.packed_tokens - 1) * self.group_stride_bytes
        return self.offset_bytes + last_group + (self.num_units - 1) * self.unit_stride_bytes + self.unit_bytes


def plain(token_stride_bytes: int, content_bytes: int) -> tuple[Part, ...]:
    """Every head holds `content_bytes` of a token in one stretch."""
    return (Part(0, 1, token_stride_bytes, 1, content_bytes, content_bytes),)


class Region(msgspec.Struct, frozen=True, array_like=True):
    """One layer on one rank, as a strided array of rows x heads x tokens.

    A row is what the attention kernel calls a block: `row_tokens` tokens. Head `h` of row `r` is at
    `base_address + r * row_stride_bytes + h * head_stride_bytes`; `parts` say where its tokens are.
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
    parts: tuple[Part, ...]

    @property
    def end_address(self) -> int:
        heads = (self.num_heads - 1) * self.head_stride_bytes
        in_head = max(part.end_bytes(self.row_tokens) for part in self.parts)
        return self.base_address + (self.num_rows - 1) * self.row_stride_bytes + heads + in_head

    @property
    def bytes_per_token(self) -> int:
        """Of all heads on this rank."""
        return self.num_heads * sum(part.group_bytes // part.packed_tokens for part in self.parts)


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
    packing: str
    """How the attention kernel orders what it does not describe by strides; empty for not at all."""
    tp_size: int
    tp_rank: int
    pp_size: int
    pp_rank: int

    def validate(self) -> None:
        """Returns when every address that a mapping can make lies inside its region, and the numbers are bounded.

        Raises RemoteProtocolError when the layout contradicts itself, Incompatible when heads do not divide over ranks.
        """
        if not 0 < len(self.regions) <= MAX_REGIONS:
            raise RemoteProtocolError(f"layout has {len(self.regions)} regions; expected 1 to {MAX_REGIONS}")
        num_groups = len(self.block_size_tokens)
        if not 0 < num_groups <= MAX_REGIONS or len(self.window_tokens) != num_groups:
            raise RemoteProtocolError(f"layout has {num_groups} block sizes and {len(self.window_tokens)} windows")
        if not all(0 < size <= MAX_BLOCK_TOKENS for size in self.block_size_tokens) or min(self.window_tokens) < 0:
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
            and 0 < len(region.parts) <= MAX_PARTS
            and all(_is_sane(part, region.row_tokens) for part in region.parts)
            and region.num_heads * sum(_num_pieces(part, region.row_tokens) for part in region.parts) <= MAX_ROW_PIECES
            and min(region.row_stride_bytes, region.head_stride_bytes) > 0
            and max(region.row_stride_bytes, region.head_stride_bytes) < MAX_ADDRESS
            and 0 < region.base_address < region.end_address < MAX_ADDRESS
        )
        if not sane:
            raise RemoteProtocolError(f"layout region {region.layer!r} is not addressable: {region}")
        num_owned = len(owned_heads(region.total_heads, self.tp_size, self.tp_rank))
        if region.num_heads != num_owned:
            raise RemoteProtocolError(
                f"layout region {region.layer!r} has {region.num_heads} heads on tensor-parallel rank {self.tp_rank} of "
                f"{self.tp_size}; of {region.total_heads} it holds {num_owned}"
            )


def _is_sane(part: Part, row_tokens: int) -> bool:
    strides = (part.group_stride_bytes, part.unit_stride_bytes)
    return (
        0 <= part.offset_bytes < MAX_ADDRESS
        and 0 < part.packed_tokens <= row_tokens
        and row_tokens % part.packed_tokens == 0
        and 0 < part.num_units <= MAX_ROW_PIECES
        and 0 < part.unit_bytes < MAX_ADDRESS
        and all(0 < stride < MAX_ADDRESS for stride in strides)
    )


def _num_pieces(part: Part, row_tokens: int) -> int:
    return row_tokens // part.packed_tokens * part.num_units


def bytes_per_token(layout: KVLayout) -> int:
    """Of one token's KV in all layers of this rank, at least one."""
    return max(1, sum(region.bytes_per_token for region in layout.regions))


def check_blocks(layout: KVLayout, blocks: Sequence[Sequence[int]]) -> None:
    """Raises RemoteProtocolError for block lists that a rank with this layout cannot have."""
    if len(blocks) != len(layout.block_size_tokens):
        raise RemoteProtocolError(
            f"block lists for {len(blocks)} cache groups from a rank that has {len(layout.block_size_tokens)}"
        )
    num_blocks = {
        region.cache_group: region.num_rows * region.row_tokens // layout.block_size_tokens[region.cache_group]
        for region in layout.regions
    }
    for group, ids in enumerate(blocks):
        most = num_blocks.get(group, MAX_BLOCKS)
        if len(ids) > most or (ids and not 0 <= min(ids) <= max(ids) < most):
            raise RemoteProtocolError(f"{len(ids)} block ids up to {max(ids)} from a rank that has {most} blocks")

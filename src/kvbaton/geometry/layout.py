"""One rank's KV cache as plain data: regions, strides, block sizes, and what must match on the other side.

Invariant: a layout is complete. Everything a peer needs to address this rank's blocks is in it, and nothing about how
it was made. A peer's layout comes from outside and is believed only after `validate`. Next: topology.py.
"""

from __future__ import annotations

import msgspec

from kvbaton.errors import RemoteProtocolError
from kvbaton.geometry.heads import owned_heads

MAX_REGIONS = 4096
MAX_GROUPS = 64
MAX_RANKS = 1024
MAX_HEADS = 1 << 16
MAX_BLOCK_TOKENS = 1 << 20
MAX_CELLS = 1 << 18
"""Heads x tokens in one row: what preparing a mapping may have to look at one by one."""
MAX_ADDRESS = 1 << 63
MAX_DEVICES = 1 << 16


class Region(msgspec.Struct, frozen=True, array_like=True):
    """One layer on one rank: a strided array of rows (kernel blocks) x heads x tokens x content bytes.

    Head `h` of token `n` in row `r` starts at `base_address + r * row_stride_bytes + h * head_stride_bytes +
    n * token_stride_bytes` and is `content_bytes` long, K and V side by side. `num_heads` are on this rank, of
    `total_heads` in the layer over all ranks; a latent cache has one head.
    """

    layer: str
    cache_group: int
    base_address: int
    num_rows: int
    row_stride_bytes: int
    row_tokens: int
    num_heads: int
    total_heads: int
    head_stride_bytes: int
    token_stride_bytes: int
    content_bytes: int

    @property
    def axes(self) -> tuple[tuple[int, int], ...]:
        """(stride in bytes, size) of rows, heads and tokens."""
        return (
            (self.row_stride_bytes, self.num_rows),
            (self.head_stride_bytes, self.num_heads),
            (self.token_stride_bytes, self.row_tokens),
        )

    @property
    def end_address(self) -> int:
        return self.base_address + sum(stride * (size - 1) for stride, size in self.axes) + self.content_bytes


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer must know of one rank's KV cache.

    `block_size_tokens` and `window_tokens` have one entry per cache group; a window of 0 keeps all tokens.
    A block is `block_size_tokens / row_tokens` consecutive rows. `num_kv_heads` is the whole model's. `axis_order` is
    for people: strides say everything.
    """

    regions: tuple[Region, ...]
    block_size_tokens: tuple[int, ...]
    window_tokens: tuple[int, ...]
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
    pp_rank: int

    def validate(self) -> None:
        """Returns when every address that a mapping can make lies inside its region, and the numbers are bounded.

        Raises RemoteProtocolError when the layout contradicts itself, Incompatible when heads do not divide over ranks.
        """
        if not 0 < len(self.regions) <= MAX_REGIONS:
            raise RemoteProtocolError(f"layout has {len(self.regions)} regions; expected 1 to {MAX_REGIONS}")
        self._validate_groups()
        self._validate_ranks()
        if not 0 <= self.device_id < MAX_DEVICES:
            raise RemoteProtocolError(f"layout has device {self.device_id}; expected 0 to {MAX_DEVICES - 1}")
        layers = [region.layer for region in self.regions]
        if len(set(layers)) != len(layers):
            raise RemoteProtocolError("layout names a layer twice")
        for region in self.regions:
            self._validate_region(region)

    def _validate_groups(self) -> None:
        sizes, windows = self.block_size_tokens, self.window_tokens
        if not 0 < len(sizes) <= MAX_GROUPS or not all(0 < size <= MAX_BLOCK_TOKENS for size in sizes):
            raise RemoteProtocolError(
                f"layout has block sizes {sizes[:MAX_GROUPS]}; expected 1 to {MAX_GROUPS} of 1 to {MAX_BLOCK_TOKENS}"
            )
        if len(windows) != len(sizes) or not all(0 <= window < MAX_ADDRESS for window in windows):
            raise RemoteProtocolError(f"layout has windows {windows[:MAX_GROUPS]} for {len(sizes)} cache groups")

    def _validate_ranks(self) -> None:
        ranks = {"tensor": (self.tp_rank, self.tp_size), "pipeline": (self.pp_rank, self.pp_size)}
        for kind, (rank, size) in ranks.items():
            if not 0 < size <= MAX_RANKS or not 0 <= rank < size:
                raise RemoteProtocolError(f"layout has {kind}-parallel rank {rank} of {size}")

    def _validate_region(self, region: Region) -> None:
        if not (_is_bounded(region) and _is_apart(region) and region.end_address < MAX_ADDRESS):
            raise RemoteProtocolError(f"layout region {region.layer!r} is not addressable: {region}")
        if not 0 <= region.cache_group < len(self.block_size_tokens):
            raise RemoteProtocolError(f"layout region {region.layer!r} is in cache group {region.cache_group}")
        block_tokens = self.block_size_tokens[region.cache_group]
        if block_tokens % region.row_tokens or region.num_rows * region.row_tokens % block_tokens:
            raise RemoteProtocolError(
                f"layout region {region.layer!r} has {region.num_rows} rows of {region.row_tokens} tokens, which do not "
                f"make whole blocks of {block_tokens}"
            )
        num_owned = len(owned_heads(region.total_heads, self.tp_size, self.tp_rank))
        if region.num_heads != num_owned:
            raise RemoteProtocolError(
                f"layout region {region.layer!r} has {region.num_heads} heads on tensor-parallel rank {self.tp_rank} of "
                f"{self.tp_size}; of {region.total_heads} it holds {num_owned}"
            )


def _is_bounded(region: Region) -> bool:
    return (
        0 < region.base_address < MAX_ADDRESS
        and 0 < region.content_bytes < MAX_ADDRESS
        and all(0 < stride < MAX_ADDRESS and size > 0 for stride, size in region.axes)
        and 0 < region.total_heads <= MAX_HEADS
        and region.num_heads * region.row_tokens <= MAX_CELLS
    )


def _is_apart(region: Region) -> bool:
    """No two (row, head, token) share a byte: each axis, from the innermost out, steps over what lies inside it."""
    inner_bytes = region.content_bytes
    for stride, size in sorted(axis for axis in region.axes if axis[1] > 1):
        if stride < inner_bytes:
            return False
        inner_bytes += stride * (size - 1)
    return True

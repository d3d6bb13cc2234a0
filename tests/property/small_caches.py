"""Engines as numpy arrays: KV caches of every axis order, rank and block size, small enough to compare byte by byte.

A `Rank` owns real memory and describes it as a `KVLayout`; `Rank.cell` reads the same memory by indices, without
strides or addresses, so that what descriptors did can be checked against what should have happened.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbaton.geometry.descriptors import Descriptors
from kvbaton.geometry.heads import owned_heads
from kvbaton.geometry.layout import KVLayout, Region

AXES = "LBHN"
ORDERS = tuple("".join(order) for order in itertools.permutations(AXES))
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Layer:
    name: str
    total_heads: int
    content_bytes: int
    window_tokens: int


@dataclass(frozen=True)
class Shape:
    """How an engine was started."""

    order: str
    tp_size: int
    pp_size: int
    row_tokens: int
    rows_per_block: int
    num_blocks: int
    padding_bytes: int
    groups: tuple[tuple[int, ...], ...]
    """Layer numbers of each cache group."""

    @property
    def block_tokens(self) -> int:
        return self.row_tokens * self.rows_per_block


class Rank:
    """One worker's memory; layers of one group, shape and stage share an allocation, as in vLLM."""

    def __init__(self, layers: tuple[Layer, ...], shape: Shape, tp_rank: int, pp_rank: int, seed: int) -> None:
        self.shape, self.layers = shape, layers
        self.tp_rank, self.pp_rank = tp_rank, pp_rank
        self._noise = np.random.default_rng(seed)
        self.memory: list[Bytes] = []
        self._views: dict[int, Bytes] = {}
        self._regions: dict[int, Region] = {}
        for group, members in enumerate(shape.groups):
            mine = [each for each in members if self.has_layer(each)]
            for _, alike in itertools.groupby(
                mine, key=lambda each: (layers[each].total_heads, layers[each].content_bytes)
            ):
                self._allocate(group, list(alike))
        self.covered = [np.zeros_like(memory) for memory in self.memory]

    def has_layer(self, layer: int) -> bool:
        return layer * self.shape.pp_size // len(self.layers) == self.pp_rank

    def heads(self, layer: int) -> range:
        return owned_heads(self.layers[layer].total_heads, self.shape.tp_size, self.tp_rank)

    def _allocate(self, group: int, members: list[int]) -> None:
        shape, first = self.shape, self.layers[members[0]]
        num_rows = shape.num_blocks * shape.rows_per_block
        sizes = {"L": len(members), "B": num_rows, "H": len(self.heads(members[0])), "N": shape.row_tokens}
        physical = [sizes[axis] for axis in shape.order] + [first.content_bytes + shape.padding_bytes]
        memory = self._noise.integers(0, 256, int(np.prod(physical)), dtype=np.uint8)
        whole = memory.reshape(physical).transpose([*(shape.order.index(axis) for axis in AXES), 4])
        self.memory.append(memory)
        for number, layer in enumerate(members):
            view = whole[number, ..., : first.content_bytes]
            self._views[layer] = view
            self._regions[layer] = Region(
                layer=self.layers[layer].name,
                cache_group=group,
                base_address=view.ctypes.data,
                num_rows=num_rows,
                row_stride_bytes=view.strides[0],
                row_tokens=shape.row_tokens,
                num_heads=sizes["H"],
                total_heads=first.total_heads,
                head_stride_bytes=view.strides[1],
                token_stride_bytes=view.strides[2],
                content_bytes=first.content_bytes,
            )

    def layout(self) -> KVLayout:
        windows = tuple(self.layers[members[0]].window_tokens for members in self.shape.groups)
        layout = KVLayout(
            regions=tuple(self._regions.values()),
            block_size_tokens=(self.shape.block_tokens,) * len(self.shape.groups),
            window_tokens=windows,
            memory_kind="DRAM",
            device_id=0,
            model="small",
            dtype="uint8",
            num_kv_heads=max(layer.total_heads for layer in self.layers),
            head_dim=1,
            axis_order=self.shape.order,
            tp_size=self.shape.tp_size,
            tp_rank=self.tp_rank,
            pp_size=self.shape.pp_size,
            pp_rank=self.pp_rank,
        )
        layout.validate()
        return layout

    def cell(self, layer: int, block: int, head: int, token_in_block: int) -> Bytes:
        """The content of one head (numbered over the layer) of one token; writing it writes the memory."""
        row = block * self.shape.rows_per_block + token_in_block // self.shape.row_tokens
        found: Bytes = self._views[layer][row, head - self.heads(layer).start, token_in_block % self.shape.row_tokens]
        return found

    def _find(self, address: int, num_bytes: int) -> tuple[int, int]:
        for number, memory in enumerate(self.memory):
            offset = address - memory.ctypes.data
            if offset >= 0 and offset + num_bytes <= memory.size:
                return number, offset
        raise AssertionError(f"{num_bytes} bytes at {address} are not in the cache")


def move(source: Rank, destination: Rank, descriptors: Descriptors, *, ours_is_source: bool) -> None:
    """Copies what the descriptors say, and counts at the destination how often each byte was written."""
    ours, theirs = descriptors.our_address.tolist(), descriptors.their_address.tolist()
    pairs = zip(ours, theirs, strict=True) if ours_is_source else zip(theirs, ours, strict=True)
    for (read_at, write_at), num_bytes in zip(pairs, descriptors.length_bytes.tolist(), strict=True):
        read_from, read_offset = source._find(read_at, num_bytes)
        write_to, write_offset = destination._find(write_at, num_bytes)
        destination.memory[write_to][write_offset : write_offset + num_bytes] = source.memory[read_from][
            read_offset : read_offset + num_bytes
        ]
        destination.covered[write_to][write_offset : write_offset + num_bytes] += 1

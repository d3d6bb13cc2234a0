"""Engines as numpy arrays: KV caches of every axis order, rank and block size, small enough to compare byte by byte.

A `Rank` owns real memory and describes it as a `KVLayout`; `Rank.where` finds the same bytes by indices, without
regions or addresses, so that what descriptors did can be checked against what should have happened.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbaton.geometry.descriptors import Descriptors
from kvbaton.geometry.heads import owned_heads
from kvbaton.geometry.layout import KVLayout, Part, Region, plain

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
    is_packed: bool = False
    """In a head's row, the first half of the content lies transposed before the other half: as vLLM's CPU keys do.

    Only where tokens are the innermost axis, and without padding.
    """

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
        self._places: dict[int, tuple[int, int, tuple[int, int, int]]] = {}
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
        for number, layer in enumerate(members):
            layer_stride, row_stride, head_stride, token_stride, _ = whole.strides
            self._places[layer] = len(self.memory), number * layer_stride, (row_stride, head_stride, token_stride)
            self._regions[layer] = Region(
                layer=self.layers[layer].name,
                cache_group=group,
                base_address=memory.ctypes.data + number * layer_stride,
                num_rows=num_rows,
                row_stride_bytes=row_stride,
                row_tokens=shape.row_tokens,
                num_heads=sizes["H"],
                total_heads=first.total_heads,
                head_stride_bytes=head_stride,
                parts=self._parts(first.content_bytes, token_stride),
            )
        self.memory.append(memory)

    def _parts(self, content_bytes: int, token_stride_bytes: int) -> tuple[Part, ...]:
        if not self.shape.is_packed:
            return plain(token_stride_bytes, content_bytes)
        num_tokens, key_bytes = self.shape.row_tokens, content_bytes // 2
        value_bytes = content_bytes - key_bytes
        values = Part(key_bytes * num_tokens, 1, value_bytes, 1, value_bytes, value_bytes)
        return (Part(0, 1, 1, key_bytes, num_tokens, 1), values) if key_bytes else (values,)

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
            packing="",
            tp_size=self.shape.tp_size,
            tp_rank=self.tp_rank,
            pp_size=self.shape.pp_size,
            pp_rank=self.pp_rank,
        )
        layout.validate()
        return layout

    def where(self, layer: int, block: int, head: int, token_in_block: int) -> tuple[int, npt.NDArray[np.int64]]:
        """(which memory, where in it) the bytes of one head, numbered over the layer, of one token are."""
        memory, offset, (row_stride, head_stride, token_stride) = self._places[layer]
        row = block * self.shape.rows_per_block + token_in_block // self.shape.row_tokens
        token = token_in_block % self.shape.row_tokens
        start = offset + row * row_stride + (head - self.heads(layer).start) * head_stride
        content = np.arange(self.layers[layer].content_bytes)
        if not self.shape.is_packed:
            return memory, start + token * token_stride + content
        num_tokens, key_bytes = self.shape.row_tokens, self.layers[layer].content_bytes // 2
        value_bytes = self.layers[layer].content_bytes - key_bytes
        values = key_bytes * num_tokens + token * value_bytes + content - key_bytes
        return memory, start + np.where(content < key_bytes, content * num_tokens + token, values)

    def read(self, layer: int, block: int, head: int, token_in_block: int) -> Bytes:
        memory, at = self.where(layer, block, head, token_in_block)
        found: Bytes = self.memory[memory][at]
        return found

    def write(self, layer: int, block: int, head: int, token_in_block: int, content: Bytes) -> None:
        memory, at = self.where(layer, block, head, token_in_block)
        self.memory[memory][at] = content
        self.covered[memory][at] += 1

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

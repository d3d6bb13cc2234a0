"""Whole engines' caches, moved by descriptors alone: every wanted byte arrives from its own position, no other changes.

All axis orders, block sizes, kernel block sizes, tensor-parallel sizes on both sides, replicated heads, stages, windows and
partial prefixes. Memory is real: each rank has an array, filled by position, and the descriptors are carried out on it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.geometry.descriptors import describe
from kvbaton.geometry.heads import owned_heads
from kvbaton.geometry.layout import KVLayout, Part, Region, plain
from kvbaton.geometry.mapping import map_layouts
from kvbaton.geometry.topology import num_readers, producers_of, unread_by_all
from kvbaton.types import End

NUM_BLOCKS = 12
CONTENT_BYTES = 2
ORDERS = list(itertools.permutations("LBHN"))
"""Outermost first; the content is always innermost. vLLM's family is six of these."""

Memory = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Layer:
    name: str
    total_heads: int
    window_tokens: int


@dataclass(frozen=True)
class Side:
    """How one engine lays out its cache."""

    layers: tuple[Layer, ...]
    order: tuple[str, ...]
    block_tokens: int
    row_tokens: int
    tp_size: int
    pp_size: int
    gap_bytes: int
    is_transposed: bool = False
    """The first byte of every token first, then every second one: as some kernels keep keys."""

    def parts(self, token_stride_bytes: int) -> tuple[Part, ...]:
        if self.is_transposed:
            return tuple(Part(byte * self.row_tokens, 1, 1, 1, 1, 1) for byte in range(CONTENT_BYTES))
        return plain(token_stride_bytes, CONTENT_BYTES)

    def layout(self, rank: int) -> tuple[KVLayout, int]:
        """(the layout of this rank, how many bytes it spans)."""
        stage, tp_rank = divmod(rank, self.tp_size)
        mine = [layer for index, layer in enumerate(self.layers) if index * self.pp_size // len(self.layers) == stage]
        groups = sorted({layer.window_tokens for layer in self.layers}, reverse=stage % 2 == 1)
        regions, base = [], 1
        for shape in sorted({(layer.total_heads, layer.window_tokens) for layer in mine}):
            alike = [layer for layer in mine if (layer.total_heads, layer.window_tokens) == shape]
            heads = len(owned_heads(shape[0], self.tp_size, tp_rank))
            sizes = {"L": len(alike), "B": NUM_BLOCKS * self.block_tokens // self.row_tokens, "H": heads}
            sizes["N"] = self.row_tokens
            strides, stride = {}, CONTENT_BYTES
            for axis in reversed(self.order):
                strides[axis] = stride
                stride *= sizes[axis]
            for index, layer in enumerate(alike):
                regions.append(
                    Region(
                        layer=layer.name,
                        cache_group=groups.index(layer.window_tokens),
                        base_address=base + index * strides["L"],
                        num_rows=sizes["B"],
                        row_stride_bytes=strides["B"],
                        row_tokens=self.row_tokens,
                        num_heads=heads,
                        total_heads=layer.total_heads,
                        head_stride_bytes=strides["H"],
                        parts=self.parts(strides["N"]),
                    )
                )
            base += stride + self.gap_bytes
        made = KVLayout(
            regions=tuple(regions),
            block_size_tokens=(self.block_tokens,) * len(groups),
            window_tokens=tuple(groups),
            memory_kind="DRAM",
            device_id=0,
            model="m",
            dtype="d",
            num_kv_heads=1,
            head_dim=1,
            axis_order="".join(self.order),
            packing="",
            tp_size=self.tp_size,
            tp_rank=tp_rank,
            pp_size=self.pp_size,
            pp_rank=stage,
        )
        made.validate()
        return made, base


@dataclass(frozen=True)
class Prompt:
    num_tokens: int
    first_token: int
    """Those before are at the decode side already."""
    cut_tokens: tuple[int, ...]
    """Where segments end."""
    prefill_ids: tuple[int, ...]
    decode_ids: tuple[int, ...]


@st.composite
def sides(draw: st.DrawFn) -> tuple[Side, Side]:
    heads = st.sampled_from((1, 2, 4))
    shapes = draw(st.lists(st.tuples(heads, st.sampled_from((0, 0, 5))), min_size=1, max_size=4))
    layers = tuple(Layer(f"layer.{index}", *shape) for index, shape in enumerate(shapes))
    pp_size = draw(st.sampled_from([size for size in (1, 2) if size <= len(layers)]))
    is_transposed = draw(st.booleans())  # on both sides: nobody pairs parts of different sizes
    orders = [order for order in ORDERS if order[-1] == "N"] if is_transposed else ORDERS

    has_window = any(layer.window_tokens for layer in layers)
    sizes = [(row, row * factor) for row in (2, 4, 6) for factor in (1, 1, 2)]

    def side(pp: int, prefill_block: int = 0) -> Side:
        """A window wants a decode block size that divides prefill's."""
        fitting = [(row, block) for row, block in sizes if not has_window or prefill_block % block == 0]
        row, block = draw(st.sampled_from(fitting))
        return Side(
            layers=layers,
            order=draw(st.sampled_from(orders)),
            block_tokens=block,
            row_tokens=row,
            tp_size=draw(st.sampled_from((1, 2, 4))),
            pp_size=pp,
            gap_bytes=draw(st.sampled_from((0, 7))),
            is_transposed=is_transposed,
        )

    prefill = side(pp_size)
    return prefill, side(1, prefill.block_tokens)


@st.composite
def prompts(draw: st.DrawFn, prefill: Side, decode: Side) -> Prompt:
    longest = (NUM_BLOCKS - 1) * min(prefill.block_tokens, decode.block_tokens)
    near = [k * decode.block_tokens + d for k in (1, 2, 3) for d in (-1, 0, 1)]
    num_tokens = draw(st.one_of(st.sampled_from([n for n in near if 0 < n <= longest]), st.integers(1, longest)))
    first = decode.block_tokens * draw(st.integers(0, (num_tokens - 1) // decode.block_tokens))
    alignment = math.lcm(prefill.block_tokens, decode.block_tokens)
    cuts = [cut for cut in range(alignment, num_tokens, alignment) if cut > first and draw(st.booleans())]

    def ids(block_tokens: int) -> tuple[int, ...]:
        runs = draw(st.permutations(range(1, NUM_BLOCKS))) if draw(st.booleans()) else list(range(1, NUM_BLOCKS))
        if draw(st.booleans()):
            runs = runs[::-1]
        return tuple(runs[: -(-num_tokens // block_tokens)])

    return Prompt(num_tokens, first, (*cuts, num_tokens), ids(prefill.block_tokens), ids(decode.block_tokens))


def addresses(layout: KVLayout, region: Region, ids: tuple[int, ...], head: int, token: int) -> list[int]:
    """Written without the code under test: where the bytes of a token are by the layout's own words."""
    size = layout.block_size_tokens[region.cache_group]
    row = ids[token // size] * (size // region.row_tokens) + token % size // region.row_tokens
    first_head = layout.tp_rank * region.total_heads // layout.tp_size
    start = region.base_address + row * region.row_stride_bytes + (head - first_head) * region.head_stride_bytes
    return [
        start + part.offset_bytes + token % region.row_tokens * part.group_stride_bytes + byte
        for part in region.parts
        for byte in range(part.unit_bytes)
    ]


def content(layer: str, head: int, token: int) -> tuple[int, int]:
    number = hash((layer, head, token))
    return number % 251, number // 251 % 251


def lists(layout: KVLayout, ids: tuple[int, ...], num_tokens: int, *, drops_outside_windows: bool) -> list[list[int]]:
    """Block lists per cache group; blocks wholly outside a window are null where the engine gave them back."""
    found = []
    for size, window in zip(layout.block_size_tokens, layout.window_tokens, strict=True):
        needed_from = max(0, num_tokens - window) if window and drops_outside_windows else 0
        found.append([each if (index + 1) * size > needed_from else 0 for index, each in enumerate(ids)])
    return found


def filled(layout: KVLayout, num_bytes: int, prompt: Prompt) -> Memory:
    memory = np.full(num_bytes, 255, dtype=np.uint8)
    for region in layout.regions:
        for head in owned_heads(region.total_heads, layout.tp_size, layout.tp_rank):
            for token in range(prompt.num_tokens):
                memory[addresses(layout, region, prompt.prefill_ids, head, token)] = content(region.layer, head, token)
    return memory


def move(source: tuple[KVLayout, Memory], target: tuple[KVLayout, Memory], prompt: Prompt, data: st.DataObject) -> None:
    """Posted by either side, in segments, as the runtime does it."""
    posts = data.draw(st.sampled_from(End), label="who posts")
    ends = (source, target) if posts is End.SOURCE else (target, source)
    mapping = map_layouts(ends[0][0], ends[1][0], posts)
    drops = data.draw(st.booleans(), label="windows dropped")
    at_source, at_target = (
        lists(each, ids, prompt.num_tokens, drops_outside_windows=drops)
        for each, ids in ((source[0], prompt.prefill_ids), (target[0], prompt.decode_ids))
    )
    ours, theirs = (at_source, at_target) if posts is End.SOURCE else (at_target, at_source)
    begin = prompt.first_token
    for end in prompt.cut_tokens:
        found = describe(mapping, ours, theirs, first_token=begin, end_token=end, num_tokens=prompt.num_tokens)
        columns = (found.our_address, found.their_address, found.length_bytes)
        for our, their, length in zip(*(column.tolist() for column in columns), strict=True):
            from_, to = (our, their) if posts is End.SOURCE else (their, our)
            target[1][to : to + length] = source[1][from_ : from_ + length]
        begin = end


@given(st.data())
def test_every_wanted_byte_arrives_from_its_own_position_and_no_other_changes(data: st.DataObject) -> None:
    prefill, decode = data.draw(sides(), label="prefill, decode")
    prompt = data.draw(prompts(prefill, decode), label="prompt")
    sources = []
    for rank in range(prefill.tp_size * prefill.pp_size):
        layout, num_bytes = prefill.layout(rank)
        sources.append((layout, filled(layout, num_bytes, prompt)))
    for reader in range(decode.tp_size):
        layout, num_bytes = decode.layout(reader)
        memory = np.full(num_bytes, 254, dtype=np.uint8)
        for producer in producers_of(layout, prefill.tp_size, prefill.pp_size):
            move(sources[producer], (layout, memory), prompt, data)
        check(layout, memory, prompt)


def check(layout: KVLayout, memory: Memory, prompt: Prompt) -> None:
    may_change = np.zeros(memory.size, dtype=bool)
    for region in layout.regions:
        window = layout.window_tokens[region.cache_group]
        needed_from = max(prompt.first_token, prompt.num_tokens - window if window else 0)
        size = layout.block_size_tokens[region.cache_group]
        for head in owned_heads(region.total_heads, layout.tp_size, layout.tp_rank):
            for token in range(prompt.first_token, len(prompt.decode_ids) * size):
                at = addresses(layout, region, prompt.decode_ids, head, token)
                may_change[at] = True
                if needed_from <= token < prompt.num_tokens:
                    assert tuple(memory[at]) == content(region.layer, head, token)
    assert (memory[~may_change] == 254).all()


@given(
    total=st.sampled_from((1, 2, 4, 8)),
    prefill_tp=st.sampled_from((1, 2, 4, 8)),
    decode_tp=st.sampled_from((1, 2, 4, 8)),
    pp=st.integers(1, 4),
)
def test_producers_and_readers_are_each_others_inverse(total: int, prefill_tp: int, decode_tp: int, pp: int) -> None:
    side = Side((Layer("layer", total, 0),), ("L", "B", "H", "N"), 4, 4, decode_tp, 1, 0)
    layouts = [side.layout(rank)[0] for rank in range(decode_tp)]
    fed_by = [producers_of(layout, prefill_tp, pp) for layout in layouts]
    for rank in range(prefill_tp * pp):
        assert num_readers(layouts[0], prefill_tp, rank) == sum(rank in producers for producers in fed_by)
    unread = set(unread_by_all(layouts[0], prefill_tp, pp))
    assert unread == set(range(prefill_tp * pp)) - {rank for producers in fed_by for rank in producers}

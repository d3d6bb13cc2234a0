"""What is moved between two engines is P's KV, all of it, once, and nothing else: compared byte by byte.

Every pair of axis orders, block sizes in both ratios, tensor-parallel sizes in both ratios, grouped-query heads with and
without copies, latent caches, stages on the prefill side, sliding windows, prefixes that D already has, and cuts between
segments.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.geometry.descriptors import alignment_tokens, describe
from kvbaton.geometry.mapping import map_layouts
from kvbaton.geometry.topology import heads_between, producers_of
from kvbaton.types import End
from tests.property.small_caches import ORDERS, Layer, Rank, Shape, move

NUM_BLOCKS = 16
Lists = list[list[int]]


@dataclass(frozen=True)
class Case:
    layers: tuple[Layer, ...]
    prefill: Shape
    decode: Shape
    num_tokens: int
    first_token: int
    cuts: tuple[int, ...]
    prefill_blocks: Lists
    decode_blocks: Lists
    posted_by: End


@st.composite
def groupings(draw: st.DrawFn, layers: tuple[Layer, ...]) -> tuple[tuple[int, ...], ...]:
    """Layers with one window in one group or in one each, groups in any order."""
    windows = sorted({layer.window_tokens for layer in layers})
    groups: list[tuple[int, ...]] = []
    for window in windows:
        members = tuple(number for number, layer in enumerate(layers) if layer.window_tokens == window)
        groups += [(each,) for each in members] if draw(st.booleans()) else [members]
    return tuple(draw(st.permutations(groups)))


@st.composite
def shapes(
    draw: st.DrawFn,
    layers: tuple[Layer, ...],
    tp_sizes: tuple[int, ...],
    pp_size: int,
    *,
    is_packed: bool,
    divides_tokens: int = 0,
) -> Shape:
    """Of blocks that divide so many tokens."""
    sizes = [
        size for size in itertools.product((1, 2, 3, 4, 6, 8), (1, 1, 2, 3)) if divides_tokens % math.prod(size) == 0
    ]
    row_tokens, rows_per_block = draw(st.sampled_from(sizes))
    orders = [order for order in ORDERS if order.endswith("N")] if is_packed else ORDERS
    return Shape(
        order=draw(st.sampled_from(orders)),
        tp_size=draw(st.sampled_from(tp_sizes)),
        pp_size=pp_size,
        row_tokens=row_tokens,
        rows_per_block=rows_per_block,
        num_blocks=draw(st.integers(14, NUM_BLOCKS)),
        padding_bytes=0 if is_packed else draw(st.sampled_from((0, 0, 0, 2))),
        groups=draw(groupings(layers)),
        is_packed=is_packed,
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    heads = draw(st.sampled_from(((1,), (2,), (4,), (6,), (1, 4), (2, 4))))
    windows = draw(st.sampled_from(((0,), (0,), (0, 5), (7,), (0, 3))))
    layers = tuple(
        Layer(f"layer.{number}", draw(st.sampled_from(heads)), draw(st.integers(1, 4)), draw(st.sampled_from(windows)))
        for number in range(draw(st.integers(1, 4)))
    )
    tp_sizes = (1, 2, 3, 6) if heads == (6,) else (1, 2, 4, 8)
    is_packed = draw(st.booleans())
    prefill = draw(shapes(layers, tp_sizes, draw(st.integers(1, len(layers))), is_packed=is_packed))
    # With a window, decode's blocks must lie within prefill's.
    divides_tokens = prefill.block_tokens if any(layer.window_tokens for layer in layers) else 0
    decode = draw(shapes(layers, tp_sizes, 1, is_packed=is_packed, divides_tokens=divides_tokens))
    size = draw(st.sampled_from((prefill.block_tokens, decode.block_tokens)))
    most = 12 * min(prefill.block_tokens, decode.block_tokens)
    num_tokens = max(1, min(most, size * draw(st.integers(1, 12)) + draw(st.integers(-1, 1))))
    num_held = draw(st.integers(0, num_tokens // decode.block_tokens))
    step = alignment_tokens([prefill.block_tokens], [decode.block_tokens])
    return Case(
        layers=layers,
        prefill=prefill,
        decode=decode,
        num_tokens=num_tokens,
        first_token=num_held * decode.block_tokens,
        cuts=tuple(draw(st.lists(st.integers(0, 20), max_size=3).map(lambda found: [each * step for each in found]))),
        prefill_blocks=draw(block_lists(layers, prefill, num_tokens, draw(st.integers(0, num_tokens - 1)))),
        decode_blocks=draw(block_lists(layers, decode, num_tokens, num_tokens)),
        posted_by=draw(st.sampled_from(End)),
    )


@st.composite
def block_lists(draw: st.DrawFn, layers: tuple[Layer, ...], shape: Shape, num_tokens: int, num_computed: int) -> Lists:
    """Per group: ids up, down and in any order; null where a window has passed when `num_computed` tokens were there."""
    lists = []
    for members in shape.groups:
        number = -(-num_tokens // shape.block_tokens)
        up = list(range(1, shape.num_blocks))
        ids = draw(st.sampled_from((up, up[::-1])) | st.permutations(up))[:number]
        window = layers[members[0]].window_tokens
        num_passed = max(0, num_computed - window + 1) // shape.block_tokens if window else 0
        lists.append([0] * min(num_passed, number) + ids[min(num_passed, number) :])
    return lists


@settings(max_examples=400)
@given(cases())
def test_decode_holds_what_prefill_computed_and_nothing_else_changed(case: Case) -> None:
    prefill = [
        Rank(case.layers, case.prefill, tp_rank, pp_rank, seed=1 + pp_rank * 100 + tp_rank)
        for pp_rank in range(case.prefill.pp_size)
        for tp_rank in range(case.prefill.tp_size)
    ]
    _copies_of_a_head_are_equal(case, prefill)
    for tp_rank in range(case.decode.tp_size):
        decode, expected = (Rank(case.layers, case.decode, tp_rank, 0, seed=1000 + tp_rank) for _ in range(2))
        _transfer(case, prefill, decode)
        _write_by_index(case, prefill, expected)
        for found, wanted in zip(decode.memory, expected.memory, strict=True):
            assert (found == wanted).all()
        for found, wanted in zip(decode.covered, expected.covered, strict=True):
            assert (found == wanted).all()  # every byte that was to be written was, once


def _copies_of_a_head_are_equal(case: Case, prefill: list[Rank]) -> None:
    for layer, described in enumerate(case.layers):
        for head in range(described.total_heads):
            holders = [rank for rank in prefill if rank.has_layer(layer) and head in rank.heads(layer)]
            for holder in holders[1:]:
                for block in range(case.prefill.num_blocks):
                    for token in range(case.prefill.block_tokens):
                        holder.write(layer, block, head, token, holders[0].read(layer, block, head, token))


def _transfer(case: Case, prefill: list[Rank], decode: Rank) -> None:
    cuts = sorted({cut for cut in case.cuts if case.first_token < cut < case.num_tokens})
    bounds = [case.first_token, *cuts, max(case.first_token, case.num_tokens)]
    for producer in producers_of(decode.layout(), case.prefill.tp_size, case.prefill.pp_size):
        source = prefill[producer]
        is_push = case.posted_by is End.SOURCE
        ours, theirs = (source, decode) if is_push else (decode, source)
        our_blocks, their_blocks = (
            (case.prefill_blocks, case.decode_blocks) if is_push else (case.decode_blocks, case.prefill_blocks)
        )
        mapping = map_layouts(ours.layout(), theirs.layout(), case.posted_by)
        for first, end in itertools.pairwise(bounds):
            found = describe(
                mapping, our_blocks, their_blocks, first_token=first, end_token=end, num_tokens=case.num_tokens
            )
            move(source, decode, found, ours_is_source=is_push)


def _blocks_of(case: Case, layer: int) -> tuple[list[int], list[int]]:
    """The block lists of the groups the layer is in: prefill's, decode's."""
    group = next(number for number, members in enumerate(case.prefill.groups) if layer in members)
    other = next(number for number, members in enumerate(case.decode.groups) if layer in members)
    return case.prefill_blocks[group], case.decode_blocks[other]


def _write_by_index(case: Case, prefill: list[Rank], decode: Rank) -> None:
    """What should happen, token by token and head by head."""
    if case.first_token >= case.num_tokens:
        return
    chunk = math.gcd(case.prefill.row_tokens, case.decode.row_tokens)
    for layer in range(len(case.layers)):
        offered, wanted = _blocks_of(case, layer)
        for token in range(case.first_token, -(-case.num_tokens // chunk) * chunk):
            block, from_block = wanted[token // case.decode.block_tokens], offered[token // case.prefill.block_tokens]
            if not block or not from_block:
                continue
            for head in decode.heads(layer):
                source = next(rank for rank in prefill if rank.has_layer(layer) and head in rank.heads(layer))
                content = source.read(layer, from_block, head, token % case.prefill.block_tokens)
                decode.write(layer, block, head, token % case.decode.block_tokens, content)


@given(cases())
def test_every_head_of_every_decode_rank_comes_from_exactly_one_prefill_rank(case: Case) -> None:
    prefill_tp, decode_tp = case.prefill.tp_size, case.decode.tp_size
    for layer in case.layers:
        for rank in range(decode_tp):
            decode = Rank((layer,), Shape("LBHN", decode_tp, 1, 1, 1, 2, 0, ((0,),)), rank, 0, seed=0)
            taken = [
                head
                for producer in range(prefill_tp)
                for head in heads_between(layer.total_heads, prefill_tp, producer, decode_tp, rank)
            ]
            assert sorted(taken) == list(decode.heads(0))

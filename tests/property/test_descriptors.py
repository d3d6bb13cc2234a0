"""Merging: as few descriptors as there are runs, whatever the order of the lists, and the same bytes."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.geometry.adjacency import join
from kvbaton.geometry.descriptors import describe
from kvbaton.geometry.mapping import map_layouts
from kvbaton.types import End
from tests.property.small_caches import ORDERS, Layer, Rank, Shape

NUM_BLOCKS = 24


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(1, 4)), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
def test_joining_keeps_every_pair_of_bytes_and_leaves_no_neighbours(
    pieces: list[tuple[int, int, int]], shuffled: object
) -> None:
    ours, theirs, num_bytes = (np.array(column, dtype=np.int64) for column in zip(*pieces, strict=True))
    columns = (column.tolist() for column in join(ours, theirs, num_bytes))
    joined: list[tuple[int, int, int]] = list(zip(*columns, strict=True))
    assert sorted(_pairs(joined)) == sorted(_pairs(pieces))
    starts = [(our, their) for our, their, _ in joined]
    assert starts == sorted(starts, key=lambda start: start[0])
    if len(set(ours.tolist())) == len(pieces):  # a byte named twice may stand between two neighbours
        ends = [(our + length, their + length) for our, their, length in joined]
        assert not [end for end, start in zip(ends, starts[1:], strict=False) if end == start]


def _pairs(pieces: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    return [(our + offset, their + offset) for our, their, length in pieces for offset in range(length)]


@given(
    st.permutations(range(1, NUM_BLOCKS)), st.integers(1, NUM_BLOCKS - 1), st.integers(1, 3), st.sampled_from(ORDERS)
)
def test_the_same_list_on_both_sides_needs_a_descriptor_per_run_and_contiguous_part(
    permuted: list[int], num_blocks: int, num_layers: int, order: str
) -> None:
    blocks = permuted[:num_blocks]
    layers = tuple(Layer(f"layer.{number}", 2, 3, 0) for number in range(num_layers))
    shape = Shape(order, 1, 1, 4, 1, NUM_BLOCKS, 0, (tuple(range(num_layers)),))
    ours, theirs = (Rank(layers, shape, 0, 0, seed) for seed in (1, 2))
    found = describe(
        map_layouts(ours.layout(), theirs.layout(), End.SOURCE),
        [blocks],
        [blocks],
        first_token=0,
        end_token=4 * num_blocks,
        num_tokens=4 * num_blocks,
    )
    taken = sorted(blocks)
    num_runs = 1 + sum(block != before + 1 for before, block in itertools.pairwise(taken))
    sizes = {"L": num_layers, "B": 1, "H": 2, "N": 4}
    outside = order[: order.index("B")]  # axes outside blocks repeat every run; inside, all are contiguous
    assert found.num_descriptors == num_runs * int(np.prod([sizes[axis] for axis in outside]))

"""For every pair of sizes: each decode head comes from exactly one rank, and both ends agree who feeds whom."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvbaton.geometry.heads import owned_heads
from kvbaton.geometry.topology import heads_between, num_readers, producers_of, unread_by_all
from tests.unit.geometry.layouts import layout, region


@st.composite
def sizes(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """(heads of some layers, prefill ranks, decode ranks), each dividing or being divided."""
    unit = draw(st.sampled_from((1, 1, 3)))
    powers = st.sampled_from((1, 2, 4, 8, 16)).map(lambda power: power * unit)
    heads = draw(st.lists(powers | st.just(1), min_size=1, max_size=3))
    return tuple(heads), draw(powers), draw(powers)


@given(sizes(), st.integers(1, 4))
def test_every_decode_head_is_fed_once_and_readers_are_the_inverse_of_producers(
    drawn: tuple[tuple[int, ...], int, int], pp_size: int
) -> None:
    heads, prefill_tp, decode_tp = drawn
    regions = [region(f"layer.{number}", total_heads=total) for number, total in enumerate(heads)]
    readers: Counter[int] = Counter()
    for decode_rank in range(decode_tp):
        decode = layout(*regions, tp_size=decode_tp, tp_rank=decode_rank)
        producers = producers_of(decode, prefill_tp, pp_size)
        assert list(producers) == sorted(set(producers))
        readers.update(producers)
        feeding = set()
        for total in heads:
            taken = {rank: heads_between(total, prefill_tp, rank, decode_tp, decode_rank) for rank in range(prefill_tp)}
            every = sorted(head for part in taken.values() for head in part)
            assert every == list(owned_heads(total, decode_tp, decode_rank))
            for rank, part in taken.items():
                assert set(part) <= set(owned_heads(total, prefill_tp, rank))
            feeding |= {rank for rank, part in taken.items() if part}
        assert producers == tuple(stage * prefill_tp + rank for stage in range(pp_size) for rank in sorted(feeding))
    for decode_rank in range(decode_tp):  # every decode rank answers the same
        decode = layout(*regions, tp_size=decode_tp, tp_rank=decode_rank)
        ranks = range(prefill_tp * pp_size)
        assert [num_readers(decode, prefill_tp, rank) for rank in ranks] == [readers[rank] for rank in ranks]
        assert unread_by_all(decode, prefill_tp, pp_size) == tuple(rank for rank in ranks if not readers[rank])

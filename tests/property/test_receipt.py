"""Complete means everything of the newest generation is here, whatever the order, the duplicates and the stragglers."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from kvbaton.errors import RemoteProtocolError
from kvbaton.protocol.receipt import Receipt


class Landed(NamedTuple):
    generation: int
    segment: int
    is_last: bool


@st.composite
def everything(draw: st.DrawFn) -> list[Landed]:
    """What is sent in every generation; older generations may have been cut short."""
    num_generations = draw(st.integers(1, 3))
    sent = []
    for generation in range(num_generations):
        num_segments = draw(st.integers(1, 6))
        segments = [Landed(generation, i, i == num_segments - 1) for i in range(num_segments)]
        sent += segments if generation == num_generations - 1 else segments[: draw(st.integers(0, num_segments))]
    return sent


@given(everything(), st.data())
def test_complete_exactly_when_the_newest_generation_is_all_here(landed: list[Landed], data: st.DataObject) -> None:
    newest = {each for each in landed if each.generation == landed[-1].generation}
    order = data.draw(st.permutations(landed + data.draw(st.lists(st.sampled_from(landed), max_size=5))))
    receipt, seen = Receipt(), set[Landed]()
    for each in order:
        is_news = receipt.add(**each._asdict())
        assert is_news == (each not in seen and each.generation == max(e.generation for e in (*seen, each)))
        seen.add(each)
        if seen & newest:  # before that, an older generation may count as complete: nobody knows of a newer one
            assert receipt.is_complete == (newest <= seen)
    assert receipt.is_complete


@given(st.lists(st.builds(Landed, st.integers(0, 2), st.integers(0, 4), st.booleans()), max_size=20))
def test_nonsense_is_refused_or_counted_and_never_more(nonsense: list[Landed]) -> None:
    receipt = Receipt()
    for each in nonsense:
        with contextlib.suppress(RemoteProtocolError):
            receipt.add(**each._asdict())
    if receipt.is_complete:
        mine = [each for each in nonsense if each.generation == max(e.generation for e in nonsense)]
        assert any(each.is_last for each in mine)
        assert 0 in {each.segment for each in mine}

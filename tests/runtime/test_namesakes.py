"""Two processes that say they are the same engine: after a restart one of them is gone, by a wrong setting both live."""

from __future__ import annotations

import pytest

from kvbaton.types import Direction, TransferId
from tests.runtime.world import BLOCK_SIZE, World

NUM_TOKENS = 4 * BLOCK_SIZE
P_BLOCKS, D_BLOCKS = [1, 2, 3, 4], [5, 6, 7, 8]


@pytest.mark.parametrize("direction", list(Direction))
def test_two_living_engines_of_one_name_are_named_and_nobody_hangs(
    direction: Direction, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    p, first = world.pair()
    second = world.engine(first.name, incarnation="another life")
    first.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS)
    world.run()
    assert "same engine_id" not in caplog.text
    other = TransferId("other")
    second.open_destination(p.ticket(direction, other), NUM_TOKENS, D_BLOCKS)
    world.run()
    assert "Another process now calls itself engine D rank 0, and 1 transfers" in caplog.text
    assert caplog.text.count("same engine_id") == 1
    p.prefill(NUM_TOKENS, P_BLOCKS)
    p.prefill(NUM_TOKENS, [9, 10, 11, 12], other, "other p")
    world.pass_time(120)
    assert "d" not in second.failures
    assert second.holds(D_BLOCKS, p, [9, 10, 11, 12])
    if "d" not in first.failures:
        assert first.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()

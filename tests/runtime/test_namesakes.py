"""Several prefill requests with one transfer id: a router that forgot to clamp `n`."""

from __future__ import annotations

import threading

import pytest

from kvbaton.runtime.events import SourceRevoked
from kvbaton.types import RequestId
from tests.runtime.world import TID, World

NUM_TOKENS = 8


@pytest.mark.parametrize("is_first_done", [False, True])
def test_one_is_handed_off_and_the_others_hold_nothing(is_first_done: bool) -> None:
    """Whether the first of them is still computing or long gone when the others come and finish."""
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, [11, 12])
    if is_first_done:
        p.prefill(NUM_TOKENS, [3, 4], rid="0_p")
        world.run()
    else:
        p.open_source(rid="0_p")
    for rid, blocks in (("1_p", [5, 6]), ("2_p", [7, 8])):
        p.prefill(NUM_TOKENS, blocks, rid=rid)
    world.run()
    assert {"1_p", "2_p"} <= set(p.sent)
    if not is_first_done:
        p.advance(NUM_TOKENS, [3, 4], rid="0_p")
        p.finish(rid="0_p")
        world.run()
    assert d.holds([11, 12], p, [3, 4])
    assert not d.failures
    world.check()


def test_one_that_hands_nothing_off_can_be_preempted_at_once() -> None:
    world = World()
    p, _ = world.pair()
    p.open_source(rid="0_p")
    p.open_source(rid="1_p")
    released = threading.Event()
    p.driver.submit([SourceRevoked(TID, RequestId("1_p"), released)])
    world.run()
    assert released.is_set()

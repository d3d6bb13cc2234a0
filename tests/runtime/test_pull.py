"""Pull: the decode side reads what the prefill side offers and holds."""

from __future__ import annotations

import threading

import pytest

from kvbaton.protocol.rendezvous import Deadlines
from kvbaton.runtime.events import SourceRevoked
from kvbaton.transport.loopback import Fabric, Fate
from kvbaton.types import Direction, RequestId
from tests.runtime.world import TID, World

PULL = Direction.PULL
P_BLOCKS = [3, 4, 5, 9, 2]
D_BLOCKS = [11, 12, 13, 6, 7]
NUM_TOKENS = 18


@pytest.mark.parametrize("is_registered_first", [False, True])
def test_the_blocks_are_read_and_then_given_back(is_registered_first: bool) -> None:
    world = World()
    p, d = world.pair()
    if is_registered_first:
        d.open_destination(p.ticket(PULL), NUM_TOKENS, D_BLOCKS)
        world.run()
    p.prefill(NUM_TOKENS, P_BLOCKS)
    world.run()
    if not is_registered_first:
        assert not p.sent
        d.open_destination(p.ticket(PULL), NUM_TOKENS, D_BLOCKS)
        world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    assert not d.failures
    world.check()


def test_only_what_the_destination_lacks_is_read() -> None:
    world = World()
    p, d = world.pair()
    p.prefill(NUM_TOKENS, P_BLOCKS)
    d.open_destination(p.ticket(PULL), NUM_TOKENS, D_BLOCKS, first_token=12)
    world.run()
    assert d.holds(D_BLOCKS[3:], p, P_BLOCKS[3:])
    world.check()


def test_nothing_is_offered_before_everything_is_final() -> None:
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(PULL), NUM_TOKENS, D_BLOCKS)
    p.open_source()
    p.advance(12, P_BLOCKS, last=False)
    world.run()
    assert world.fabric.num_operations == 1  # the greeting
    p.advance(NUM_TOKENS, P_BLOCKS)
    p.finish()
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()


def test_reading_that_takes_longer_than_the_lease_renews_it() -> None:
    """Found: the renewals prolonged the prefill side's promise, but the decode side went by the first one."""
    world = World(
        fabric=Fabric(script=lambda _number: Fate(delay_polls=10**9)),
        deadlines=Deadlines(offered_s=8.0, posting_s=60.0),
    )
    p, d = world.pair()
    p.prefill(NUM_TOKENS, P_BLOCKS)
    d.open_destination(p.ticket(PULL), NUM_TOKENS, D_BLOCKS)
    for _ in range(40):
        world.now_s += 1.0
        p.turn()
        d.turn()
    for posted in d.transport._posted.values():
        posted.polls_left = 0
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    assert not d.failures
    world.check()


def test_what_was_read_after_the_lease_is_not_believed() -> None:
    """The prefill side fell silent, so its promise ran out; whose bytes those were nobody knows."""
    world = World(
        fabric=Fabric(script=lambda _number: Fate(delay_polls=10**9)),
        deadlines=Deadlines(offered_s=8.0, posting_s=60.0, draining_s=10.0),
    )
    p, d = world.pair()
    p.prefill(NUM_TOKENS, P_BLOCKS)
    d.open_destination(p.ticket(PULL), NUM_TOKENS, D_BLOCKS)
    for _ in range(3):
        p.turn()
        d.turn()
    for _ in range(9):
        world.now_s += 1.0
        d.turn()
    for posted in d.transport._posted.values():
        posted.polls_left = 0
    world.run(d)
    assert "lease ended" in d.failures[RequestId("d")]
    world.run()
    world.check()


def test_blocks_that_may_still_be_preempted_are_not_offered() -> None:
    """Found: a reader believed in the lease of blocks that a preemption overwrote while it could not be told."""
    world = World()
    p, d = world.pair()
    p.open_source()
    p.advance(NUM_TOKENS, P_BLOCKS)
    d.open_destination(p.ticket(PULL), NUM_TOKENS, D_BLOCKS)
    world.run()
    assert not d.received
    released = threading.Event()
    p.driver.submit([SourceRevoked(TID, RequestId("p"), released)])
    p.turn()
    assert released.is_set()
    p.advance(NUM_TOKENS, P_BLOCKS, generation=1)
    p.finish()
    world.run()
    assert not d.failures
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()


def test_a_drain_that_the_reader_has_not_heard_of_does_not_renew_its_lease() -> None:
    world = World(fabric=Fabric(script=lambda number: Fate(delay_polls=10**9 if number else 0)))
    p, d = world.pair()
    p.prefill(NUM_TOKENS, P_BLOCKS)
    d.open_destination(p.ticket(PULL), NUM_TOKENS, D_BLOCKS)
    for _ in range(4):
        p.turn()
        d.turn()
    (reader,) = p.driver._source._transfers[TID].readers.values()
    for _ in range(31):
        world.now_s += 1.0
        p.turn()
    assert reader.rendezvous.state.value == "draining"
    d.channel.receive()  # what was said is lost
    until_s = next(d.driver._destination._all_legs()).lease_until_s
    world.now_s += 1.0
    d.turn()
    p.turn()
    d.turn()
    assert next(d.driver._destination._all_legs()).lease_until_s == until_s
    for posted in d.transport._posted.values():
        posted.polls_left = 0
    world.run()
    assert d.failures
    world.check()

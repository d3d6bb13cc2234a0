"""What an engine's metrics say of whole stories, as its steps would take it: also the last one before it falls idle."""

from __future__ import annotations

import pytest

from kvbaton.runtime.events import Results
from kvbaton.runtime.metrics import Fenced
from kvbaton.runtime.tally import Snapshot
from kvbaton.transport.loopback import Fabric, Fate
from kvbaton.types import Direction, RequestId, TransferId
from tests.runtime.world import Engine, World

PUSH, PULL = Direction.PUSH, Direction.PULL
FOREVER = 10**9
both_directions = pytest.mark.parametrize("direction", [PUSH, PULL])


def take(engine: Engine) -> Snapshot:
    """Everything since the last one."""
    return engine.rank.journal.tally.take(engine.world.now_s) or Snapshot()


def peers(engine: Engine) -> dict[str, float]:
    """By end and state, as the gauge would be now; those at nothing are left out."""
    gauges = engine.rank.journal.tally._gauges(engine.world.now_s)
    return {key.removeprefix("peers|"): value for key, value in gauges.items() if key.startswith("peers") and value}


class StepAtOnce(Results):
    """An engine whose step takes a result, and the metrics with it, in the moment it is there; then it falls idle."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self.told = Snapshot()
        engine.results = engine.rank.results = self

    def _step(self) -> None:
        self.told = take(self._engine)

    def sent(self, request_id: RequestId) -> None:
        super().sent(request_id)
        self._step()

    def received(self, request_id: RequestId, failure: str | None) -> None:
        super().received(request_id, failure)
        self._step()


class TestAnIdleEngine:
    """Metrics travel with steps, and an idle engine takes none: what it told last must stay true."""

    @both_directions
    def test_the_step_that_takes_a_transfers_end_tells_all_of_it(self, direction: Direction) -> None:
        world = World()
        p, d = world.pair()
        steps = StepAtOnce(p), StepAtOnce(d)
        d.open_destination(p.ticket(direction), 8, [3, 4])
        p.prefill(8, [1, 2])
        world.run()
        for step, side in zip(steps, ("prefill", "decode"), strict=True):
            assert step.told.counted == {f"transfers|{side}|{direction.value}|delivered": 1}
            assert step.told.gauges
            assert not any(step.told.gauges.values())
        assert not take(p).counted
        assert not take(d).counted
        world.check()

    @both_directions
    def test_a_prefill_engine_that_has_no_request_says_nothing_of_those_who_wait_for_one(
        self, direction: Direction
    ) -> None:
        world = World()
        p, d = world.pair()
        d.open_destination(p.ticket(direction), 8, [3, 4])
        world.run()
        assert not any(take(p).gauges.values())
        world.pass_time(40)
        assert take(p).counted[f"transfers|prefill|{direction.value}|expired"] == 1
        world.check()


class TestPeers:
    @both_directions
    def test_each_end_counts_the_other_while_a_transfer_is_open(self, direction: Direction) -> None:
        world = World()
        p, d = world.pair()
        p.open_source()
        d.open_destination(p.ticket(direction), 8, [3, 4])
        d.turn()
        assert peers(d) == {"decode|connecting": 1}
        world.run()
        assert (peers(p), peers(d)) == ({"prefill|connected": 1}, {"decode|connected": 1})
        p.advance(8, [1, 2])
        p.finish()
        world.run()
        assert (peers(p), peers(d)) == ({}, {})
        world.check()

    @both_directions
    def test_one_over_whose_link_something_was_delivered_is_connected(self, direction: Direction) -> None:
        world = World()
        p, d = world.pair()
        d.open_destination(p.ticket(direction), 8, [3, 4])
        p.prefill(8, [1, 2])
        world.run()
        p.open_source(TransferId("u"), "p2")
        d.open_destination(p.ticket(direction, TransferId("u")), 8, [5, 6], rid="d2")
        world.run()
        assert (peers(p), peers(d)) == ({"prefill|connected": 1}, {"decode|connected": 1})
        d.cancel("d2")
        p.finish(TransferId("u"), "p2", held=False, aborted=True)
        world.run()
        world.check()

    def test_a_pull_that_was_delivered_proves_the_link_though_nobody_said_so(self) -> None:
        """The decode side read before it looked for the greeting, and had nothing to wait for afterwards."""
        world = World()
        p, d = world.pair()
        d.open_destination(p.ticket(PULL), 8, [3, 4])
        p.prefill(8, [1, 2])
        d.turn()
        p.turn()
        d.transport._inbox.clear()
        world.run()
        (peer,) = p.rank.peers._by_incarnation.values()
        assert peer.is_connected
        assert not p.rank.peers.are_connecting(world.now_s)
        world.check()

    def test_a_link_that_carries_nothing_stays_connecting(self) -> None:
        world = World()
        p, d = world.pair()
        p.open_source()
        d.open_destination(p.ticket(), 8, [3, 4])
        d.turn()
        p.turn()
        d.transport._inbox.clear()
        world.pass_time(20)
        assert (peers(p), peers(d)) == ({"prefill|connecting": 1}, {"decode|connecting": 1})
        d.cancel()
        p.finish(held=False, aborted=True)
        world.run()
        assert (peers(p), peers(d)) == ({}, {})
        world.check()

    @both_directions
    def test_one_that_died_is_no_longer_counted(self, direction: Direction) -> None:
        world = World()
        p, d = world.pair()
        d.open_destination(p.ticket(direction), 8, [3, 4])
        world.run()
        p.crash()
        world.run()
        assert peers(d) == {}

    def test_a_prefill_engine_that_forgot_us_is_a_stranger_until_it_greets_again(self) -> None:
        world = World()
        p, d = world.pair()
        d.open_destination(p.ticket(), 8, [3, 4])
        p.prefill(8, [1, 2])
        world.run()
        p.rank.fence(Fenced.STUCK_OPERATION)
        p.open_source(TransferId("u"), "p2")
        d.open_destination(p.ticket(tid=TransferId("u")), 8, [5, 6], rid="d2")
        d.turn()
        world.run()
        assert (peers(p), peers(d)) == ({"prefill|connected": 1}, {"decode|connected": 1})
        p.advance(8, [1, 2], tid=TransferId("u"), rid="p2")
        p.finish(TransferId("u"), "p2")
        world.run()
        world.check()


class TestFences:
    def test_one_against_a_silent_writer(self) -> None:
        world = World()
        p, d = world.pair()
        d.open_destination(p.ticket(), 8, [3, 4])
        world.run()
        world.pass_time(60, d)
        assert take(d).counted["fences|silent_writer"] == 1
        world.run()
        world.pass_time(60)
        assert not [key for key in take(p).counted if key.startswith("fences")]
        world.check()

    def test_a_reader_has_nothing_to_fence_off(self) -> None:
        world = World()
        p, d = world.pair()
        d.open_destination(p.ticket(PULL), 8, [3, 4])
        world.run()
        world.pass_time(60, d)
        assert not [key for key in take(d).counted if key.startswith("fences")]

    @both_directions
    def test_one_against_an_operation_that_the_transport_does_not_let_go_of(self, direction: Direction) -> None:
        world = World(fabric=Fabric(script=lambda number: Fate(delay_polls=FOREVER)))
        p, d = world.pair()
        d.open_destination(p.ticket(direction), 8, [3, 4])
        p.prefill(8, [1, 2])
        for _ in range(90):
            world.now_s += 1
            p.turn()
            d.turn()
        mover = p if direction is PUSH else d
        assert take(mover).counted["fences|stuck_operation"] == 1
        world.check()

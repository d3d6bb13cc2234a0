"""What an engine's metrics say of whole stories, as its steps would take it: also the last one before it falls idle."""

from __future__ import annotations

import msgspec
import pytest

from kvbaton.protocol.messages import Offer
from kvbaton.runtime.events import Results
from kvbaton.runtime.metrics import Fenced
from kvbaton.runtime.sidechannel import Endpoint
from kvbaton.runtime.tally import Snapshot
from kvbaton.transport.loopback import Fabric, Fate
from kvbaton.types import Direction, EngineId, RequestId, TransferId
from tests.runtime.memory_channel import HOST
from tests.runtime.world import TID, Engine, World

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


def undelivered(engine: Engine) -> dict[str, int]:
    """By end, outcome and reason; and that each was counted as a transfer that is over."""
    counted = take(engine).counted
    found = {
        key.partition("|")[2]: number for key, number in counted.items() if key.startswith("transfers_undelivered|")
    }
    over = [key.split("|") for key in counted if key.startswith("transfers|")]
    assert sorted((end, outcome) for _, end, _, outcome in over if outcome != "delivered") == sorted(
        (end, outcome) for end, outcome, _ in (key.split("|") for key in found)
    )
    return found


class TestReasons:
    """A transfer that did not deliver is counted once at each end that had one, under what really happened."""

    def registered(self, world: World, direction: Direction) -> tuple[Engine, Engine]:
        p, d = world.pair()
        d.open_destination(p.ticket(direction), 8, [3, 4])
        world.run()
        return p, d

    @both_directions
    def test_the_decode_request_was_given_up(self, direction: Direction) -> None:
        world = World()
        p, d = self.registered(world, direction)
        d.cancel()
        world.run()
        assert undelivered(p) == {"prefill|cancelled|peer_gave_up": 1}
        assert undelivered(d) == {"decode|cancelled|given_up": 1}
        world.check()

    @both_directions
    def test_the_prefill_request_was_aborted(self, direction: Direction) -> None:
        """Found: the decode side counted it as failed."""
        world = World()
        p, d = self.registered(world, direction)
        p.open_source()
        p.finish(held=False, aborted=True)
        world.run()
        assert undelivered(p) == {"prefill|cancelled|given_up": 1}
        assert undelivered(d) == {"decode|cancelled|peer_gave_up": 1}
        world.check()

    @both_directions
    def test_the_prefill_side_is_another_engine(self, direction: Direction) -> None:
        world = World()
        p, d = world.pair()
        ticket = msgspec.structs.replace(p.ticket(direction), engine_id=EngineId("other"))
        d.open_destination(ticket, 8, [3, 4])
        world.run()
        assert take(p).counted == {"registrations_refused|wrong_engine": 1}
        assert undelivered(d) == {"decode|failed|peer_ended": 1}
        world.check()

    def test_the_layouts_do_not_fit(self) -> None:
        world = World()
        p, d = world.engine("P"), world.engine("D", dtype="float16")
        d.open_destination(p.ticket(), 8, [3, 4])
        world.run()
        assert take(p).counted == {
            "registrations_refused|mismatch": 1,
            "num_failed_handshakes": 1,
            "num_failed_transfers": 1,
        }
        assert undelivered(d) == {"decode|failed|peer_ended": 1}
        world.check()

    @both_directions
    def test_the_prompts_differ(self, direction: Direction) -> None:
        world = World()
        p, d = self.registered(world, direction)
        p.prefill(7, [1, 2])
        world.run()
        assert undelivered(p) == {"prefill|failed|mismatch": 1}
        assert undelivered(d) == {"decode|failed|peer_ended": 1}
        world.check()

    def test_another_prompt_is_offered_than_was_asked_for(self) -> None:
        """Found: that was counted as a handshake that failed."""
        world = World()
        p, d = self.registered(world, PULL)
        offer = Offer(TID, num_tokens=7, blocks=((1, 2),), lease_s=30.0, hello=p.rank.hello)
        d.driver._destination.receive(Endpoint(HOST, p.channel.port), offer, world.now_s)
        assert "num_failed_handshakes" not in d.rank.journal.tally._counted
        assert undelivered(d) == {"decode|failed|mismatch": 1}
        world.run()
        world.check()

    @both_directions
    def test_the_transport_fails(self, direction: Direction) -> None:
        world = World(fabric=Fabric(script=lambda number: Fate(fails_at_poll=number > 0)))
        p, d = self.registered(world, direction)
        p.prefill(8, [1, 2])
        world.run()
        mover, other = (p, d) if direction is PUSH else (d, p)
        sides = ("prefill", "decode") if direction is PUSH else ("decode", "prefill")
        assert mover.rank.journal.tally._counted["num_failed_transfers"] == 1
        assert undelivered(mover) == {f"{sides[0]}|failed|not_moved": 1}
        assert undelivered(other) == {f"{sides[1]}|failed|peer_ended": 1}
        world.check()

    @both_directions
    def test_no_prefill_request_comes(self, direction: Direction) -> None:
        """Found: the decode side counted it as failed, the prefill side as a request whose blocks it had held."""
        world = World()
        p, d = self.registered(world, direction)
        world.pass_time(40)
        assert "num_kv_expired_reqs" not in p.rank.journal.tally._counted
        assert undelivered(p) == {"prefill|expired|nobody_came": 1}
        assert undelivered(d) == {"decode|expired|peer_ended": 1}
        world.check()

    def test_no_decode_side_comes(self) -> None:
        world = World()
        p, _ = world.pair()
        p.prefill(8, [1, 2])
        world.run()
        world.pass_time(40)
        assert take(p).counted == {
            "transfers|prefill|unknown|expired": 1,
            "transfers_undelivered|prefill|expired|nobody_came": 1,
            "num_kv_expired_reqs": 1,
        }
        world.check()

    def test_the_decode_side_could_not_read_in_time(self) -> None:
        """Found: the prefill side counted it as failed. Its lease did not end: the decode side renewed it to the last."""
        world = World(fabric=Fabric(script=lambda number: Fate(delay_polls=FOREVER)))
        p, d = world.pair()
        d.open_destination(p.ticket(PULL), 8, [3, 4])
        p.prefill(8, [1, 2])
        for _ in range(90):
            world.now_s += 1
            p.turn()
            d.turn()
        assert take(p).counted == {
            "transfers|prefill|pull|expired": 1,
            "transfers_undelivered|prefill|expired|peer_ended": 1,
        }
        assert undelivered(d) == {"decode|expired|silence": 1}
        world.check()

    @both_directions
    def test_the_prefill_process_dies(self, direction: Direction) -> None:
        world = World()
        p, d = self.registered(world, direction)
        p.crash()
        world.run()
        assert undelivered(d) == {"decode|failed|peer_lost": 1}

    @both_directions
    def test_the_prefill_side_falls_silent(self, direction: Direction) -> None:
        world = World()
        _, d = self.registered(world, direction)
        world.pass_time(60, d)
        assert undelivered(d) == {"decode|expired|silence": 1}

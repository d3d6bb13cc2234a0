"""Silence is not death: who fell silent may wake up, and must find nothing of ours within its reach."""

from __future__ import annotations

import pytest

from kvbaton.protocol.messages import Confirm, Renew, decode_side, encode
from kvbaton.runtime import source
from kvbaton.runtime.peers import IDLE_S
from kvbaton.runtime.sidechannel import Caller, Endpoint
from kvbaton.transport.loopback import Fabric, Fate
from kvbaton.types import Direction, RequestId, TransferId
from tests.runtime.memory_channel import HOST, MemoryChannel
from tests.runtime.world import TID, Engine, World

PUSH, PULL = Direction.PUSH, Direction.PULL
P_BLOCKS = [3, 4, 5, 9, 2]
D_BLOCKS = [11, 12, 13, 6, 7]
NUM_TOKENS = 18
FOREVER = 10**9
OTHER = TransferId("other")

both_directions = pytest.mark.parametrize("direction", [PUSH, PULL])


def wait_alone(world: World, engine: Engine, seconds: float) -> None:
    """Only this engine runs."""
    for _ in range(int(seconds)):
        world.now_s += 1.0
        engine.turn()


def reuse(engine: Engine, blocks: list[int]) -> None:
    """Somebody else's KV is in these blocks now."""
    engine.may_change.difference_update(blocks)
    engine.pool[:, blocks] = 77
    engine.before[:, blocks] = 77


def test_a_prefill_side_that_wakes_up_asks_before_it_writes() -> None:
    """Found: it wrote into blocks that had been given back while it was stopped."""
    world = World()
    p, d = world.pair()
    p.open_source()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    world.run()
    p.advance(NUM_TOKENS, P_BLOCKS)  # lies in its inbox while it stands still
    p.finish()
    d.cancel()
    wait_alone(world, d, 30)
    assert d.received[RequestId("d")] == 1
    reuse(d, D_BLOCKS)
    world.run()
    world.pass_time(60)
    world.check()


def test_a_registration_that_lay_unread_while_the_prefill_side_stood_still_is_not_believed_at_once() -> None:
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    d.turn()
    d.cancel()
    wait_alone(world, d, 30)
    reuse(d, D_BLOCKS)
    p.prefill(NUM_TOKENS, P_BLOCKS)
    assert isinstance(p.channel, MemoryChannel)
    # Only the registration comes through at first: what was said later is on its way.
    late = list(p.channel._mailbox)[1:]
    p.channel._mailbox = type(p.channel._mailbox)(list(p.channel._mailbox)[:1])
    p.turn()
    p.channel._mailbox.extend(late)
    world.run()
    world.pass_time(60)
    world.check()


def test_a_stall_that_nobody_minded_costs_a_question_and_no_more() -> None:
    world = World()
    p, d = world.pair()
    p.open_source()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    world.run()
    p.advance(NUM_TOKENS, P_BLOCKS)
    p.finish()
    wait_alone(world, d, 3)
    world.run()
    assert not d.failures
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()


def test_a_write_of_a_prefill_side_that_stays_silent_cannot_land_after_the_blocks_were_given_back() -> None:
    """Found: after the drain's deadline D gave the blocks back, and the write that P had begun landed in them."""
    world = World(fabric=Fabric(script=lambda number: Fate(delay_polls=FOREVER if number == 1 else 0)))
    p, d = world.pair()
    p.prefill(NUM_TOKENS, P_BLOCKS)
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    for _ in range(4):
        d.turn()
        p.turn()
    assert p.rank.mover.is_busy
    d.cancel()
    wait_alone(world, d, 60)
    assert d.received[RequestId("d")] == 1
    reuse(d, D_BLOCKS)
    for posted in p.transport.posted.values():
        posted.polls_left = 0
    world.run()
    world.pass_time(60)
    world.check()


@both_directions
def test_after_a_fence_everything_in_flight_has_failed_and_everything_new_works(direction: Direction) -> None:
    world = World(fabric=Fabric(script=lambda number: Fate(delay_polls=FOREVER if 1 <= number <= 3 else 0)))
    healthy, silent = world.engine("H"), world.engine("P")
    d = world.engine("D")
    silent.open_source()
    d.open_destination(silent.ticket(), NUM_TOKENS, D_BLOCKS)
    world.run()
    d.cancel()
    wait_alone(world, d, 8)
    healthy.prefill(NUM_TOKENS, P_BLOCKS, OTHER, "h")
    d.open_destination(healthy.ticket(direction, OTHER), NUM_TOKENS, [15, 16, 17, 18, 19], rid="e")
    for _ in range(20):
        world.now_s += 1.0
        d.turn()
        healthy.turn()
    assert d.received[RequestId("d")] == 1
    assert list(d.failures) == [RequestId("d"), RequestId("e")]
    again = TransferId("again")
    healthy.prefill(NUM_TOKENS, P_BLOCKS, again, "i")
    d.open_destination(healthy.ticket(direction, again), NUM_TOKENS, [15, 16, 17, 18, 19], rid="f")
    world.run(d, healthy)
    assert d.received[RequestId("f")] == 1
    assert RequestId("f") not in d.failures
    assert d.holds([15, 16, 17, 18, 19], healthy, P_BLOCKS)
    silent.finish(held=True, aborted=True)
    world.run()
    world.pass_time(90)
    d.may_change.update(D_BLOCKS)
    world.check()


def test_a_question_about_a_transfer_nobody_wants_is_answered_with_a_cancellation() -> None:
    world = World()
    p, d = world.pair()
    p.prefill(NUM_TOKENS, P_BLOCKS)
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    world.run()
    p.channel.send(Caller(b"0"), encode(Confirm("never", 1)))
    d.turn()
    assert isinstance(p.channel, MemoryChannel)
    assert b"nobody here wants it" in p.channel._mailbox[-1].data
    world.run()
    world.check()


def test_an_answer_to_an_older_question_does_not_count() -> None:
    world = World()
    p, d = world.pair()
    p.open_source()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    world.run()
    p.advance(NUM_TOKENS, P_BLOCKS)
    p.finish()
    wait_alone(world, d, 3)
    p.turn()
    (reader,) = p.driver._source._transfers[TID].readers.values()
    assert reader.question is not None
    stale = encode(Renew(TID, d.rank.incarnation, answers=reader.question + 1))
    d.channel.send(Endpoint(HOST, p.channel.port), stale)
    p.turn()
    assert not p.rank.mover.is_busy
    assert not d.received
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()


def test_an_answer_that_lay_unread_is_no_younger_than_the_question() -> None:
    """Found: P asked, stood still, and took the answer for fresh; by then only the fence stood before the blocks."""
    world = World()
    p, d = world.pair()
    p.open_source()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    world.run()
    p.advance(NUM_TOKENS, P_BLOCKS)
    p.finish()
    wait_alone(world, d, 3)
    p.turn()  # asks
    d.turn()  # answers
    d.cancel()
    wait_alone(world, d, 40)
    assert d.received[RequestId("d")] == 1
    reuse(d, D_BLOCKS)
    assert isinstance(p.channel, MemoryChannel)
    # The answer comes through first; what was said after it is still on its way.
    waiting = list(p.channel._mailbox)
    answer = next(each for each in waiting if getattr(decode_side(each.data), "answers", 0))
    late = waiting[waiting.index(answer) + 1 :]
    p.channel._mailbox = type(p.channel._mailbox)(waiting[: waiting.index(answer) + 1])
    num_operations = world.fabric.num_operations
    p.turn()
    assert world.fabric.num_operations == num_operations  # it asks again
    p.channel._mailbox.extend(late)
    world.run()
    world.pass_time(60)
    world.check()


def test_a_registration_that_was_refused_is_not_taken_when_it_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: D gave its blocks back at the refusal, and P wrote into them when the same registration came a second time."""
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    d.turn()
    assert isinstance(p.channel, MemoryChannel)
    again = list(p.channel._mailbox)
    monkeypatch.setattr(source, "MAX_TRANSFERS_PER_READER", 0)
    p.turn()
    monkeypatch.undo()
    d.turn()
    assert d.received[RequestId("d")] == 1
    reuse(d, D_BLOCKS)
    p.channel._mailbox.extend(again)
    p.prefill(NUM_TOKENS, P_BLOCKS)
    world.run()
    world.pass_time(60)
    world.check()


def test_an_offer_that_was_lost_alone_is_made_again() -> None:
    world = World()
    p, d = world.pair()
    p.prefill(NUM_TOKENS, P_BLOCKS)
    d.open_destination(p.ticket(PULL), NUM_TOKENS, D_BLOCKS)
    d.turn()
    p.turn()
    d.channel.receive()  # nothing else is wrong with the connection
    world.pass_time(6)
    assert not d.failures
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()


def break_connection(d: Engine, p: Engine) -> None:
    """Everything said and not heard yet is lost; both processes live."""
    endpoint = Endpoint(HOST, p.channel.port)
    assert isinstance(p.channel, MemoryChannel)
    p.channel._mailbox.clear()
    d.channel.hang_up(endpoint)


def test_an_offer_that_was_lost_with_its_connection_is_made_again() -> None:
    world = World()
    p, d = world.pair()
    p.prefill(NUM_TOKENS, P_BLOCKS)
    d.open_destination(p.ticket(PULL), NUM_TOKENS, D_BLOCKS)
    d.turn()
    p.turn()
    break_connection(d, p)
    world.run()
    assert not d.received
    world.pass_time(6)
    assert not d.failures
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()


def test_a_question_that_was_lost_with_its_connection_is_asked_again() -> None:
    world = World()
    p, d = world.pair()
    p.open_source()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    world.run()
    p.advance(NUM_TOKENS, P_BLOCKS)
    p.finish()
    wait_alone(world, d, 3)
    p.turn()
    break_connection(d, p)
    world.pass_time(6)
    assert not d.failures
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()


@both_directions
def test_a_registration_that_was_lost_with_its_connection_is_made_again(direction: Direction) -> None:
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS)
    d.turn()
    break_connection(d, p)
    p.prefill(NUM_TOKENS, P_BLOCKS)
    world.pass_time(4)
    assert not d.failures
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()


@both_directions
def test_a_cancellation_that_was_lost_with_its_connection_is_said_again(direction: Direction) -> None:
    world = World()
    p, d = world.pair()
    p.open_source()
    d.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS)
    world.run()
    d.cancel()
    d.turn()
    break_connection(d, p)
    world.pass_time(8)
    assert d.received[RequestId("d")] == 1
    p.advance(NUM_TOKENS, P_BLOCKS)
    p.finish()
    d.may_change.clear()
    world.pass_time(45)  # a lease and a drain at the most
    assert p.sent[RequestId("p")] == 1
    world.check()


@both_directions
def test_a_peer_without_transfers_is_forgotten_after_a_while_and_welcome_again(direction: Direction) -> None:
    """Found: the link and the memory of an engine that went away stayed until another one of its name came."""
    world = World()
    p, d = world.pair()
    p.prefill(NUM_TOKENS, P_BLOCKS)
    d.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS)
    world.run()
    assert len(p.rank.peers) == 1
    world.pass_time(IDLE_S + 2)
    assert len(p.rank.peers) == len(d.rank.peers) == 0
    assert isinstance(d.channel, MemoryChannel)
    assert d.channel.num_lines == 0
    again = TransferId("again")
    p.prefill(NUM_TOKENS, P_BLOCKS, again, "q")
    d.open_destination(p.ticket(direction, again), NUM_TOKENS, [15, 16, 17, 18, 19], rid="e")
    world.run()
    assert d.holds([15, 16, 17, 18, 19], p, P_BLOCKS)
    assert not d.failures
    world.check()


def test_a_peer_with_a_transfer_is_not_forgotten_however_long_it_computes() -> None:
    world = World()
    p, d = world.pair()
    p.open_source()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    world.pass_time(IDLE_S * 2)
    assert not d.received
    p.advance(NUM_TOKENS, P_BLOCKS)
    p.finish()
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()


@both_directions
def test_a_decode_request_given_up_while_it_was_to_introduce_itself_leaves_nothing_held(direction: Direction) -> None:
    """Found: the prefill side did not know the decode side yet, and held its blocks until the lease ended."""
    world = World()
    p, d = world.pair()
    p.prefill(NUM_TOKENS, P_BLOCKS)
    line = d.driver._destination._lines.use(Endpoint(HOST, p.channel.port), world.now_s)
    line.knows_us_as = d.rank.incarnation  # it does not: it has restarted since
    d.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS)
    d.turn()
    p.turn()
    d.cancel()
    d.turn()
    world.run()
    assert p.sent[RequestId("p")] == 1
    world.check()

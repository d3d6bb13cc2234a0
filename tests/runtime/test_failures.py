"""What goes wrong, one thing at a time: every request still ends once, honestly, and no block is given back too early."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from kvbaton.protocol.messages import (
    Accepted,
    Connected,
    Ended,
    Offer,
    Register,
    Release,
    SegmentLanded,
    encode,
)
from kvbaton.protocol.rendezvous import Deadlines
from kvbaton.runtime.sidechannel import Caller, Endpoint
from kvbaton.transport.loopback import Fabric, Fate
from kvbaton.types import Direction, EngineId, Outcome, RequestId, TransferId
from tests.runtime.memory_channel import HOST, MemoryChannel
from tests.runtime.world import TID, Engine, World

PUSH, PULL = Direction.PUSH, Direction.PULL
P_BLOCKS = [3, 4, 5, 9, 2]
D_BLOCKS = [11, 12, 13, 6, 7]
NUM_TOKENS = 18
P, D = RequestId("p"), RequestId("d")
FOREVER = 10**9

both_directions = pytest.mark.parametrize("direction", [PUSH, PULL])


def script(*fates: Fate, greeting: Fate = Fate()) -> Fabric:  # noqa: B008  frozen
    """The greeting's fate, then those of the operations that follow; after these everything goes well."""
    return Fabric(script=lambda number: dict(enumerate((greeting, *fates))).get(number, Fate()))


def land(engine: Engine) -> None:
    """Whatever is delayed forever may arrive now."""
    for posted in engine.transport.posted.values():
        posted.polls_left = 0


def failure_of(engine: Engine) -> str:
    assert list(engine.failures) == [D]
    return engine.failures[D]


# -- refusals --------------------------------------------------------------------------------------------------------


@both_directions
def test_a_registration_for_another_engine_is_refused_at_once(direction: Direction) -> None:
    """Another engine listens there now; the ticket's host and port are not believed."""
    world = World()
    p, d = world.pair()
    ticket = msgspec.structs.replace(p.ticket(direction), engine_id=EngineId("other"))
    d.open_destination(ticket, NUM_TOKENS, D_BLOCKS)
    world.run()
    assert "this is engine P, not other" in failure_of(d)
    world.check()


@both_directions
@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"window_tokens": (8,)}, ("sliding window of layer layer.0 differs", "0", "8")),
        ({"dtype": "float16"}, ("KV cache dtype differs", "uint8", "float16")),
        ({"regions": "half"}, ("set of layers differs", "layer.1", "[]")),
        ({"model": "x" * 5000}, ("model differs", "tiny")),  # too long for the wire, still told
    ],
)
def test_incompatible_layouts_are_refused_by_name_with_both_values(
    direction: Direction, changed: dict[str, object], named: tuple[str, ...]
) -> None:
    world = World()
    p = world.engine("P")
    if "regions" in changed:
        changed = {"regions": world.engine("scratch").rank.hello.layout.regions[:1]}
    d = world.engine("D", **changed)
    p.prefill(NUM_TOKENS, P_BLOCKS)
    d.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS)
    world.run()
    for words in named:
        assert words in failure_of(d)
    assert d.received[D] == 1
    world.pass_time(60)  # the source's lease ends; nobody else came
    world.check()


@both_directions
def test_prompts_of_different_lengths_are_refused(direction: Direction) -> None:
    world = World()
    p, d = world.pair()
    p.prefill(NUM_TOKENS, P_BLOCKS)
    d.open_destination(p.ticket(direction), NUM_TOKENS + 1, D_BLOCKS)
    world.run()
    assert "18" in failure_of(d)
    assert "19" in failure_of(d)
    world.check()


@both_directions
def test_a_second_destination_of_one_transfer_is_refused_and_the_first_served(direction: Direction) -> None:
    world = World()
    p, d = world.pair()
    thief = world.engine("thief")
    d.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS)
    world.run()
    thief.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS)
    world.run()
    assert "another request already receives" in failure_of(thief)
    p.prefill(NUM_TOKENS, P_BLOCKS)
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    thief.may_change.clear()
    world.check()


def test_two_requests_of_one_engine_for_one_transfer_are_told_apart() -> None:
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    d.open_destination(p.ticket(), NUM_TOKENS, [15, 16, 17, 18, 19], rid="d2")
    p.prefill(NUM_TOKENS, P_BLOCKS)
    world.run()
    assert "another request here" in d.failures[RequestId("d2")]
    d.may_change.difference_update((15, 16, 17, 18, 19))
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()


def test_a_second_prefill_of_one_transfer_feeds_nothing_and_ends() -> None:
    world = World()
    p, d = world.pair()
    p.open_source()
    p.prefill(NUM_TOKENS, [20, 21, 22, 23, 1], rid="p2")
    world.run()
    assert p.sent[RequestId("p2")] == 1
    p.advance(NUM_TOKENS, P_BLOCKS)
    p.finish()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()


@both_directions
def test_a_registration_said_twice_changes_nothing(direction: Direction) -> None:
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS)
    d.turn()
    assert isinstance(p.channel, MemoryChannel)
    p.channel._mailbox.extend(list(p.channel._mailbox))
    p.prefill(NUM_TOKENS, P_BLOCKS)
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    assert not d.failures
    world.check()


def test_a_registration_said_again_in_another_way_is_refused() -> None:
    """Found: only the blocks were compared, so a push could turn into a pull half-way."""
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    world.run()
    (reader,) = p.driver._source._transfers[TID].readers.values()
    again = msgspec.structs.replace(reader.register, direction=PULL, hello=None)
    d.channel.send(Endpoint(HOST, p.channel.port), encode(again))
    p.turn()
    assert reader.register.direction is PUSH
    world.run()
    assert "another request already receives" in failure_of(d)
    p.prefill(NUM_TOKENS, P_BLOCKS)
    d.may_change.update(D_BLOCKS)
    world.pass_time(60)


def test_block_lists_too_short_for_the_prompt_fail_the_transfer() -> None:
    world = World()
    p, d = world.pair()
    p.prefill(NUM_TOKENS, P_BLOCKS)
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS[:3])
    world.run()
    assert "3 blocks of 4 tokens cannot hold token 17" in failure_of(d)
    world.check()


def test_block_lists_of_too_few_groups_fail_the_transfer() -> None:
    world = World()
    p, d = world.pair()
    p.prefill(NUM_TOKENS, P_BLOCKS)
    d.open_destination(p.ticket(), NUM_TOKENS, [])
    register = Register(TID, "P", d.rank.hello.incarnation, PUSH, 0, NUM_TOKENS, (), 10.0, 1, d.rank.hello)
    d.channel.send(Endpoint(HOST, p.channel.port), encode(register))
    world.run()
    assert failure_of(d)
    world.pass_time(60)  # a refusal is final for this decode rank, so what was held for it ends with its lease
    world.check()


# -- the prefill side gives up ---------------------------------------------------------------------------------------


@both_directions
@pytest.mark.parametrize("is_held", [False, True])
def test_a_prefill_aborted_before_the_registration(direction: Direction, is_held: bool) -> None:
    world = World()
    p, d = world.pair()
    p.open_source()
    p.finish(aborted=True, held=is_held)
    world.run()
    d.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS)
    world.run()
    assert "aborted" in failure_of(d)
    world.check()


@both_directions
def test_a_prefill_aborted_after_the_registration(direction: Direction) -> None:
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS)
    p.open_source()
    world.run()
    p.advance(8, P_BLOCKS, last=False)
    p.finish(aborted=True)
    world.run()
    assert "aborted" in failure_of(d)
    world.check()


def test_a_prefill_aborted_while_bytes_move_gives_nothing_back_before_they_land() -> None:
    world = World(fabric=script(Fate(delay_polls=FOREVER)))
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    p.open_source()
    p.advance(8, P_BLOCKS, last=False)
    turn_all(world)
    p.finish(aborted=True)
    turn_all(world)
    assert not p.sent
    assert not d.received
    land(p)
    world.run()
    assert "aborted" in failure_of(d)
    world.check()


def turn_all(world: World, num_rounds: int = 6) -> None:
    """For worlds with an operation that does not end: `run` would wait for it."""
    for _ in range(num_rounds):
        for each in world.engines:
            if each.is_alive:
                each.turn()


@both_directions
def test_a_registration_after_the_source_gave_up_is_answered_at_once(direction: Direction) -> None:
    world = World()
    p, d = world.pair()
    p.prefill(NUM_TOKENS, P_BLOCKS)
    world.pass_time(31)
    assert p.sent[P] == 1
    d.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS)
    world.run()
    assert "expired (no decode side registered" in failure_of(d)
    world.check()


# -- the decode side gives up ----------------------------------------------------------------------------------------


@both_directions
def test_cancelled_before_anything_was_answered(direction: Direction) -> None:
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS)
    d.cancel()
    world.run()
    assert failure_of(d) == "the decode request was given up"
    p.prefill(NUM_TOKENS, P_BLOCKS)
    world.run()
    assert p.sent[P] == 1  # at once: nobody will come
    world.check()


@both_directions
def test_cancelled_while_the_prompt_computes(direction: Direction) -> None:
    world = World()
    p, d = world.pair()
    p.open_source()
    d.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS)
    world.run()
    d.cancel()
    world.run()
    assert d.received[D] == 1
    p.advance(NUM_TOKENS, P_BLOCKS)
    p.finish()
    world.run()
    d.may_change.clear()
    world.check()


def test_cancelled_between_two_segments() -> None:
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    p.open_source()
    p.advance(8, P_BLOCKS, last=False)
    world.run()
    d.cancel()
    world.run()
    assert d.received[D] == 1
    p.advance(NUM_TOKENS, P_BLOCKS)
    p.finish()
    world.run()
    d.may_change = set(D_BLOCKS[:2])
    world.check()


def test_cancelled_while_bytes_move_gives_nothing_back_before_they_land() -> None:
    world = World(fabric=script(Fate(delay_polls=FOREVER)))
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    p.prefill(NUM_TOKENS, P_BLOCKS)
    turn_all(world)
    d.cancel()
    turn_all(world)
    assert not d.received
    assert not p.sent
    land(p)
    world.run()
    assert failure_of(d) == "the decode request was given up"
    world.check()


def test_a_read_cancelled_while_bytes_move_gives_nothing_back_before_they_land() -> None:
    world = World(fabric=script(Fate(delay_polls=FOREVER)))
    p, d = world.pair()
    d.open_destination(p.ticket(PULL), NUM_TOKENS, D_BLOCKS)
    p.prefill(NUM_TOKENS, P_BLOCKS)
    turn_all(world)
    d.cancel()
    turn_all(world)
    assert not d.received
    assert not p.sent
    land(d)
    world.run()
    assert failure_of(d) == "the decode request was given up"
    world.check()


@both_directions
def test_cancelled_after_delivery_changes_nothing(direction: Direction) -> None:
    world = World()
    p, d = world.pair()
    p.prefill(NUM_TOKENS, P_BLOCKS)
    d.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS)
    world.run()
    d.cancel()
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    assert not d.failures
    world.check()


def test_everything_arriving_after_the_cancellation_is_no_success() -> None:
    """And the prefill side, told that it ended, keeps its blocks until its own handle is done."""
    world = World(fabric=script(Fate(delay_polls=3)))
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    p.prefill(NUM_TOKENS, P_BLOCKS)
    while not p.rank.mover.is_busy:
        turn_all(world, 1)
    d.cancel()
    world.run()
    assert failure_of(d) == "the decode request was given up"
    world.check()


@pytest.mark.parametrize("is_first", [False, True])
def test_nothing_needed_frees_the_source_at_once(is_first: bool) -> None:
    world = World()
    p, d = world.pair()
    steps: list[Callable[[], None]] = [lambda: p.prefill(NUM_TOKENS, P_BLOCKS), lambda: d.nothing_needed(p.ticket())]
    for step in reversed(steps) if is_first else steps:
        step()
        world.run()
    assert p.sent[P] == 1
    world.check()


def test_nothing_needed_as_first_contact_does_not_make_the_next_transfer_look_unanswered() -> None:
    """Found: the five seconds to the first answer were counted from the first contact, however long ago."""
    world = World()
    p, d = world.pair()
    d.nothing_needed(p.ticket(tid=TransferId("before")))
    world.run()
    world.pass_time(20)
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    d.turn()
    assert not d.failures
    p.prefill(NUM_TOKENS, P_BLOCKS)
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()


def test_nothing_needed_of_a_transfer_in_hand_is_left_to_its_own_cancellation() -> None:
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    d.nothing_needed(p.ticket())
    p.prefill(NUM_TOKENS, P_BLOCKS)
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    assert not d.failures
    world.check()


def test_a_peer_that_calls_it_delivered_does_not_end_our_writing() -> None:
    """Found: the source gave its blocks back while its own handle was still in flight."""
    world = World(fabric=script(Fate(delay_polls=FOREVER)))
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    p.prefill(NUM_TOKENS, P_BLOCKS)
    turn_all(world)
    d.channel.send(Endpoint(HOST, p.channel.port), encode(Ended(TID, d.rank.incarnation, Outcome.DELIVERED)))
    turn_all(world)
    assert not p.sent
    land(p)
    world.run()
    world.check()


# -- the transport fails ---------------------------------------------------------------------------------------------


@both_directions
def test_a_post_that_fails(direction: Direction) -> None:
    world = World(fabric=script(Fate(fails_at_post=True)))
    p, d = world.pair()
    d.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS)
    p.prefill(NUM_TOKENS, P_BLOCKS)
    world.run()
    assert "cannot be posted" in failure_of(d)
    world.check()


@both_directions
def test_an_operation_that_fails(direction: Direction) -> None:
    world = World(fabric=script(Fate(fails_at_poll=True)))
    p, d = world.pair()
    d.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS)
    p.prefill(NUM_TOKENS, P_BLOCKS)
    world.run()
    assert "the transport reports" in failure_of(d)
    world.check()


def test_a_greeting_that_fails_refuses_the_registration() -> None:
    world = World(fabric=script(greeting=Fate(fails_at_post=True)))
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    world.run()
    assert "cannot be notified" in failure_of(d)
    world.check()


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_one_of_several_segments_fails_and_its_siblings_land_before_anything_is_given_back(failing: int) -> None:
    fates = [Fate(delay_polls=FOREVER)] * 3
    fates[failing] = Fate(fails_at_poll=True, delay_polls=2)
    world = World(fabric=script(*fates))
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    p.open_source()
    world.run()
    p.advance(4, P_BLOCKS, last=False)
    p.turn()
    p.advance(8, P_BLOCKS, last=False)
    p.turn()
    p.advance(NUM_TOKENS, P_BLOCKS)
    p.finish()
    turn_all(world, 10)
    assert world.fabric.num_operations == 4
    assert not d.received
    assert not p.sent
    land(p)
    world.run()
    assert "the transport reports" in failure_of(d)
    world.check()


def test_a_lost_notification_ends_by_a_deadline() -> None:
    world = World(fabric=script(Fate(notifies=0)))
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    p.prefill(NUM_TOKENS, P_BLOCKS)
    world.pass_time(61)
    assert failure_of(d)
    world.check()


@both_directions
def test_a_handle_that_never_ends_is_cut_off_with_the_transport_before_its_blocks_are_given_back(
    direction: Direction,
) -> None:
    """Found: the drain's deadline gave them back, and a late write landed in somebody else's blocks."""
    world = World(fabric=script(Fate(delay_polls=FOREVER)))
    p, d = world.pair()
    d.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS)
    p.prefill(NUM_TOKENS, P_BLOCKS)
    poster, reports = (p, p.sent) if direction is PUSH else (d, d.received)
    first_transport = poster.transport
    for _ in range(100):
        world.now_s += 1.0
        turn_all(world, 1)
        if first_transport.posted:
            assert not reports
    assert reports
    assert poster.transport is not first_transport
    world.pass_time(60)
    assert failure_of(d)
    d.may_change.clear()
    world.check()


# -- the peer is gone or silent --------------------------------------------------------------------------------------


@both_directions
@pytest.mark.parametrize("is_computing", [False, True])
def test_the_prefill_process_dies(direction: Direction, is_computing: bool) -> None:
    world = World()
    p, d = world.pair()
    if is_computing:
        p.open_source()
    d.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS)
    world.run()
    p.crash()
    world.run(d)
    assert "is gone: the connection broke" in failure_of(d)
    assert isinstance(d.channel, MemoryChannel)
    assert d.channel.num_lines == 0
    d.check()


@both_directions
def test_the_prefill_process_dies_while_bytes_move(direction: Direction) -> None:
    world = World(fabric=script(Fate(delay_polls=FOREVER)))
    p, d = world.pair()
    d.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS)
    p.prefill(NUM_TOKENS, P_BLOCKS)
    turn_all(world)
    p.crash()
    turn_all(world)
    world.run(d)
    assert "is gone" in failure_of(d)
    assert isinstance(d.channel, MemoryChannel)
    assert d.channel.num_lines == 0
    d.check()


@both_directions
def test_the_decode_process_dies(direction: Direction) -> None:
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS)
    world.run()
    d.crash()
    p.prefill(NUM_TOKENS, P_BLOCKS)
    world.pass_time(61, p)
    p.check()


@both_directions
def test_nobody_listens(direction: Direction) -> None:
    world = World()
    p, d = world.pair()
    p.crash()
    d.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS)
    world.pass_time(4, d)
    assert not d.received
    world.pass_time(2, d)
    assert "nobody answers at that address" in failure_of(d)
    d.check()


@both_directions
def test_an_address_that_cannot_be_called_fails_its_request_only(direction: Direction) -> None:
    """Found: the error of the socket library ended the transfer thread, and with it the engine."""
    world = World()
    p, d = world.pair()
    bad = msgspec.structs.replace(p.ticket(direction), host="no host")
    d.open_destination(bad, NUM_TOKENS, D_BLOCKS)
    d.nothing_needed(bad)
    world.run()
    assert "cannot be called" in failure_of(d)
    world.check()


@both_directions
def test_a_silent_source_is_fenced_after_its_deadline(direction: Direction) -> None:
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS)
    world.run()
    world.pass_time(29, d)
    assert not d.received
    world.pass_time(13, d)
    assert "no progress while" in failure_of(d)
    world.run()  # it wakes up, and finds that nobody waits any more
    p.prefill(NUM_TOKENS, P_BLOCKS)
    d.may_change.clear()
    world.pass_time(60)
    world.check()


@both_directions
@pytest.mark.parametrize("stalled_s", [6.0, 60.0])
def test_a_source_that_slept_does_not_write_to_who_hung_up_meanwhile(direction: Direction, stalled_s: float) -> None:
    """Found: it read the old registration first and wrote to blocks that were given back."""
    world = World()
    p, d = world.pair()
    p.prefill(NUM_TOKENS, P_BLOCKS)
    p.turn()
    d.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS)
    world.pass_time(stalled_s, d)
    assert "nobody answers" in failure_of(d)
    d.may_change.clear()
    world.pass_time(60)
    world.check()


def test_a_cancellation_that_waits_is_heard_before_anything_more_is_posted() -> None:
    """Found: commands were obeyed first, and a source that slept wrote to blocks that were given back."""
    world = World()
    p, d = world.pair()
    p.open_source()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    world.run()
    d.cancel()
    world.pass_time(11, d)
    assert d.received[D] == 1
    p.advance(NUM_TOKENS, P_BLOCKS)
    p.finish()
    world.run()
    d.may_change.clear()
    world.check()


@both_directions
def test_the_waiting_side_renews_while_the_prompt_waits_and_computes(direction: Direction) -> None:
    world = World()
    p, d = world.pair()
    p.open_source()
    d.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS)
    world.pass_time(100)
    p.advance(4, P_BLOCKS, last=False)
    world.pass_time(100)  # found: a step longer than the progress timeout ended a half-streamed transfer
    p.advance(NUM_TOKENS, P_BLOCKS)
    p.finish()
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    assert not d.failures
    world.check()


def test_posting_renews_the_deadline_for_moving() -> None:
    """Found: a chunk posted just before the deadline of the one before had no time to land."""
    world = World(fabric=script(Fate(), Fate(delay_polls=FOREVER)))
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    p.open_source()
    p.advance(4, P_BLOCKS, last=False)
    world.run()
    world.pass_time(29.5)
    p.advance(NUM_TOKENS, P_BLOCKS)
    p.finish()
    turn_all(world)
    world.now_s += 1.0
    turn_all(world)
    land(p)
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    assert not d.failures
    world.check()


def test_a_prefill_that_never_comes_ends_the_wait() -> None:
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    world.pass_time(31)
    assert "no prefill request of this transfer arrived in time" in failure_of(d)
    p.prefill(NUM_TOKENS, P_BLOCKS)
    world.run()
    assert p.sent[P] == 1  # too late, and nobody will come: given back at once
    world.check()


def test_a_registration_that_was_dropped_is_asked_for_again() -> None:
    """Found: each renewal was answered "accepted", so both sides waited for ever."""
    world = World()
    p, d = world.pair()
    before = TransferId("before")
    p.prefill(4, [1], tid=before, rid="p1")
    d.open_destination(p.ticket(tid=before), 4, [20], rid="d1")
    world.run()
    p.open_source()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    d.turn()
    assert isinstance(p.channel, MemoryChannel)
    p.channel._mailbox.clear()
    world.pass_time(6)
    p.advance(NUM_TOKENS, P_BLOCKS)
    p.finish()
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()


# -- forgetting and restarting ---------------------------------------------------------------------------------------


@both_directions
def test_a_source_that_forgot_us_asks_who_we_are(direction: Direction) -> None:
    world = World()
    p, d = world.pair()
    first, second = TransferId("first"), TransferId("second")
    p.prefill(4, [1], tid=first, rid="p1")
    d.open_destination(p.ticket(direction, first), 4, [20], rid="d1")
    world.run()
    for peer in list(p.rank.peers._by_incarnation.values()):
        p.rank.peers.forget(peer)
    p.prefill(NUM_TOKENS, P_BLOCKS, tid=second)
    d.open_destination(p.ticket(direction, second), NUM_TOKENS, D_BLOCKS)
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    assert not d.failures
    world.check()


def test_a_cancelled_transfer_does_not_register_again() -> None:
    """The source forgot us; its question crosses our cancellation, and must not bring the blocks back into play."""
    world = World()
    p, d = world.pair()
    d.nothing_needed(p.ticket(tid=TransferId("before")))
    d.open_destination(p.ticket(), 4, [20], rid="d1")
    p.prefill(4, [1], rid="p1")
    world.run()
    for peer in list(p.rank.peers._by_incarnation.values()):
        p.rank.peers.forget(peer)
    second = TransferId("second")
    d.open_destination(p.ticket(tid=second), NUM_TOKENS, D_BLOCKS)
    d.turn()
    d.cancel()
    d.turn()
    p.prefill(NUM_TOKENS, P_BLOCKS, tid=second)
    world.run()
    d.may_change = {20}
    world.check()


@both_directions
def test_an_engine_restarted_at_the_same_address(direction: Direction) -> None:
    world = World()
    p, d = world.pair()
    first, second = TransferId("first"), TransferId("second")
    p.prefill(4, [1], tid=first, rid="p1")
    d.open_destination(p.ticket(direction, first), 4, [20], rid="d1")
    world.run()
    port = p.channel.port
    p.crash()
    again = world.engine("P", incarnation="second", port=port)
    world.run(again, d)
    again.prefill(NUM_TOKENS, P_BLOCKS, tid=second)
    d.open_destination(again.ticket(direction, second), NUM_TOKENS, D_BLOCKS)
    world.run(again, d)
    assert d.holds(D_BLOCKS, again, P_BLOCKS)
    assert len(d.rank.peers) <= 1
    world.check()


def test_a_decode_engine_restarted_replaces_its_old_self() -> None:
    world = World()
    p, d = world.pair()
    first, second = TransferId("first"), TransferId("second")
    p.prefill(4, [1], tid=first, rid="p1")
    d.open_destination(p.ticket(tid=first), 4, [20], rid="d1")
    world.run()
    d.crash()
    again = world.engine("D", incarnation="second")
    p.prefill(NUM_TOKENS, P_BLOCKS, tid=second)
    again.open_destination(p.ticket(tid=second), NUM_TOKENS, D_BLOCKS)
    world.run(p, again)
    assert again.holds(D_BLOCKS, p, P_BLOCKS)
    assert len(p.rank.peers) == 1
    world.check()


# -- strangers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"garbage", b"\x91" * 5000, encode(Ended("nobody's", "i", Outcome.FAILED))])
def test_what_a_stranger_says_changes_nothing(data: bytes) -> None:
    world = World()
    p, d = world.pair()
    stranger = MemoryChannel(world.network)
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    world.run()
    for engine in (p, d):
        stranger.send(Endpoint(HOST, engine.channel.port), data)
    world.run()
    p.prefill(NUM_TOKENS, P_BLOCKS)
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()


def test_a_stranger_cannot_replace_a_peer_it_cannot_be() -> None:
    """Found: the old peer was forgotten before the new one had proved itself."""
    world = World()
    p, d = world.pair()
    first, second = TransferId("first"), TransferId("second")
    p.prefill(4, [1], tid=first, rid="p1")
    d.open_destination(p.ticket(tid=first), 4, [20], rid="d1")
    world.run()
    fake = world.engine("fake")
    hello = fake.rank.hello.__class__(1, "D", 0, "stolen", fake.rank.hello.agent_metadata, fake.rank.hello.layout)
    register = Register(second, "P", "stolen", PUSH, 0, NUM_TOKENS, (tuple(D_BLOCKS),), 10.0, 1, hello)
    fake.channel.send(Endpoint(HOST, p.channel.port), encode(register))
    world.run()
    assert p.rank.peers.find(d.rank.hello.incarnation) is not None
    p.prefill(NUM_TOKENS, P_BLOCKS, tid=second)
    d.open_destination(p.ticket(tid=second), NUM_TOKENS, D_BLOCKS)
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()


@pytest.mark.parametrize("version", [1, 3])
def test_another_protocol_version_is_refused_with_both_numbers(version: int) -> None:
    world = World()
    p, d = world.pair()
    hello = d.rank.hello
    other = msgspec.structs.replace(hello, protocol_version=version)
    d.rank.hello = other
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    world.run()
    assert f"2 on this engine, {version} on the peer" in failure_of(d)
    world.check()


def test_what_a_prefill_side_must_not_say_is_dropped() -> None:
    """And the other way round: each end obeys only the messages that are for it."""
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    world.run()
    caller = Caller(b"0")
    p.channel.send(caller, encode(Connected()))
    d.channel.send(Endpoint(HOST, p.channel.port), encode(Accepted(TID)))
    world.run()
    p.prefill(NUM_TOKENS, P_BLOCKS)
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()


@pytest.mark.parametrize("data", [b"", b"garbage", encode(SegmentLanded("another", 0, 0, is_last=True))])
def test_a_notification_that_means_nothing_is_dropped(data: bytes) -> None:
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    world.run()
    p.transport.notify(d.transport.name, data)
    world.run()
    assert not d.received
    p.prefill(NUM_TOKENS, P_BLOCKS)
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()


def test_a_landing_told_by_an_engine_that_has_no_business_with_it_is_dropped() -> None:
    world = World()
    p, d = world.pair()
    stranger = world.engine("stranger")
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    world.run()
    stranger.transport.connect(d.transport.local_metadata())
    stranger.transport.notify(d.transport.name, encode(SegmentLanded("t", 0, 0, is_last=True)))
    world.run()
    assert not d.received
    p.prefill(NUM_TOKENS, P_BLOCKS)
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()


@pytest.mark.parametrize("engine_id", ["other", "P"])
def test_an_offer_is_believed_only_from_the_engine_that_was_asked_and_of_the_same_prompt(engine_id: str) -> None:
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(PULL), NUM_TOKENS, D_BLOCKS)
    world.run()
    hello = msgspec.structs.replace(p.rank.hello, engine_id=engine_id)
    p.channel.send(Caller(b"0"), encode(Offer(TID, 17, ((3, 4, 5, 9, 2),), 30.0, hello)))
    world.run()
    assert (
        "engine other rank 0 answers for P rank 0" if engine_id == "other" else "18 tokens here and 17"
    ) in failure_of(d)
    p.prefill(NUM_TOKENS, P_BLOCKS)
    world.run()
    d.may_change.clear()
    world.check()


def test_an_offer_of_blocks_that_are_not_there_fails_the_read() -> None:
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(PULL), NUM_TOKENS, D_BLOCKS)
    world.run()
    p.channel.send(Caller(b"0"), encode(Offer(TID, NUM_TOKENS, ((3, 4, 5, 9, 99),), 30.0, p.rank.hello)))
    world.run()
    assert "the peer's block ids span 3 to 99; the registered cache has 24 blocks" in failure_of(d)
    d.may_change.clear()
    p.prefill(NUM_TOKENS, P_BLOCKS)
    world.run()
    world.check()


def test_a_cancellation_by_the_prefill_side_ends_a_read() -> None:
    """The lease ran out while the reader was slow: it stops, says so, and only then are the blocks reused."""
    world = World(fabric=script(Fate(delay_polls=FOREVER)), deadlines=Deadlines(offered_s=3.0, draining_s=60.0))
    p, d = world.pair()
    d.open_destination(p.ticket(PULL), NUM_TOKENS, D_BLOCKS)
    p.prefill(NUM_TOKENS, P_BLOCKS)
    turn_all(world)
    world.now_s += 4.0
    p.turn()  # the reader had no time to renew
    turn_all(world)
    assert not p.sent
    land(d)
    world.run()
    assert "offered" in failure_of(d)
    world.check()


def test_a_release_for_another_engine_or_of_a_registered_transfer_changes_nothing() -> None:
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    world.run()
    for to_engine_id in ("other", "P"):
        d.channel.send(Endpoint(HOST, p.channel.port), encode(Release(TID, to_engine_id)))
    world.run()
    p.prefill(NUM_TOKENS, P_BLOCKS)
    world.run()
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()


def test_an_introduction_that_is_not_the_senders_is_refused() -> None:
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    register = Register(TransferId("u"), "P", "not d's", PUSH, 0, 4, ((1,),), 10.0, 1, d.rank.hello)
    d.channel.send(Endpoint(HOST, p.channel.port), encode(register))
    world.run()
    assert p.num_transfers == 1
    p.prefill(NUM_TOKENS, P_BLOCKS)
    world.run()
    world.check()


def test_one_incarnation_is_one_engine() -> None:
    """Found: a second engine under the same incarnation was taken for the first, and written to in its place."""
    world = World()
    p, d = world.pair()
    double = world.engine("double", incarnation=d.rank.hello.incarnation)
    d.open_destination(p.ticket(), NUM_TOKENS, D_BLOCKS)
    world.run()
    double.open_destination(p.ticket(tid=TransferId("u")), 4, [20])
    p.prefill(NUM_TOKENS, P_BLOCKS)
    world.run()
    assert "is engine D's" in failure_of(double)
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()

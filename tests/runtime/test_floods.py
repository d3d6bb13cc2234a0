"""A peer that floods, or is of another cluster, costs the others nothing, and whoever waits for it learns why."""

from __future__ import annotations

import logging

import pytest

from kvbaton.protocol.messages import Confirm, Ended, Register, SegmentPosted, decode_side, encode
from kvbaton.runtime import source
from kvbaton.runtime.seldom import INTERVAL_S, Seldom
from kvbaton.runtime.sidechannel import MAX_RECEIVED, NO_KEY_THERE, Endpoint
from kvbaton.types import Direction, Outcome, TransferId
from tests.runtime.memory_channel import HOST, MemoryChannel
from tests.runtime.world import Engine, World

BLOCKS = [1, 2]


def flooded(world: World, engine: Engine, num_messages: int) -> MemoryChannel:
    stranger = MemoryChannel(world.network)
    for _ in range(num_messages):
        stranger.send(Endpoint(HOST, engine.channel.port), b"nonsense")
    return stranger


def test_a_flood_does_not_keep_a_turn_from_ending_or_a_transfer_from_being_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    p, d = world.pair()
    flooded(world, p, 10 * MAX_RECEIVED)
    d.open_destination(p.ticket(), 8, BLOCKS)
    p.prefill(8, BLOCKS)
    with caplog.at_level(logging.WARNING, "vllm.kvbaton"):
        p.turn()
        assert isinstance(p.channel, MemoryChannel)
        assert p.channel.has_mail
        world.run()
    assert d.holds(BLOCKS, p, BLOCKS)
    assert len(caplog.records) == 1
    world.pass_time(60.0)
    world.check()


def test_dropped_messages_are_logged_as_a_count_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    p = world.engine("P")
    with caplog.at_level(logging.WARNING, "vllm.kvbaton"):
        flooded(world, p, 100)
        world.run()
        world.pass_time(INTERVAL_S + 1.0)
        flooded(world, p, 1)
        world.run()
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "Dropped 1 side-channel messages",
        "Dropped 100 side-channel messages",
    ]


def test_a_word_that_lay_behind_a_flood_is_not_taken_for_fresh() -> None:
    """The decode side may have given the blocks away since: it is asked before anything is written."""
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(), 8, BLOCKS)
    d.turn()
    flooded(world, p, MAX_RECEIVED)
    p.prefill(8, BLOCKS)
    for _ in range(3):
        p.turn()
    assert not p.rank.mover.is_busy
    assert (d.pool == d.before).all()
    assert isinstance(d.channel, MemoryChannel)
    said = [decode_side(received.data) for received in d.channel._mailbox]
    assert any(isinstance(message, Confirm) for message in said)
    assert not any(isinstance(message, SegmentPosted) for message in said)
    world.run()
    assert d.holds(BLOCKS, p, BLOCKS)
    world.pass_time(60.0)
    world.check()


def test_registrations_for_requests_that_never_come_are_bounded_per_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_TRANSFERS_PER_READER", 5)
    world = World()
    p, d = world.pair()
    stranger, channel = Engine(world, "S"), MemoryChannel(world.network)
    hello = stranger.rank.hello
    for number in range(20):
        register = Register(
            f"never {number}", "P", hello.incarnation, Direction.PUSH, 0, 8, ((1, 2),), 1.0, hello=hello
        )
        for _ in range(2):  # what is known already is not counted again
            channel.send(Endpoint(HOST, p.channel.port), encode(register))
    world.run()
    assert p.num_transfers == 5
    answers = [decode_side(received.data) for received in channel.receive()]
    refused = {each.transfer_id: each for each in answers if isinstance(each, Ended)}
    assert set(refused) == {f"never {number}" for number in range(5, 20)}
    assert {each.outcome for each in refused.values()} == {Outcome.FAILED}
    assert "5 transfers from this decode rank are open here" in refused["never 5"].reason
    d.open_destination(p.ticket(), 8, BLOCKS)
    p.prefill(8, BLOCKS)
    world.run()
    assert d.holds(BLOCKS, p, BLOCKS)
    world.pass_time(60.0)
    world.check()
    channel.send(
        Endpoint(HOST, p.channel.port),
        encode(Register("later", "P", hello.incarnation, Direction.PUSH, 0, 8, ((1, 2),), 1.0, hello=hello)),
    )
    world.run()
    assert p.num_transfers == 1  # room again
    world.pass_time(60.0)
    world.check()


def test_a_prefill_side_of_another_cluster_fails_its_request_at_once_and_by_name() -> None:
    world = World()
    p, d = world.pair()
    other = world.engine("Q")
    assert isinstance(d.channel, MemoryChannel)
    d.channel.refusals[Endpoint(HOST, other.channel.port)] = NO_KEY_THERE
    d.open_destination(other.ticket(tid=TransferId("of another cluster")), 8, [5, 6], rid="d2")
    d.open_destination(p.ticket(), 8, BLOCKS)
    p.prefill(8, BLOCKS)
    world.run()
    assert d.failures == {
        "d2": f"the prefill side at {HOST}:{other.channel.port} will not talk to this engine: {NO_KEY_THERE}"
    }
    assert d.holds(BLOCKS, p, BLOCKS)
    world.pass_time(60.0)
    world.check()


def test_what_is_suspected_of_a_silent_address_is_said_when_the_wait_for_it_ends() -> None:
    world = World()
    d = world.engine("D")
    nobody = world.engine("Q")
    assert isinstance(d.channel, MemoryChannel)
    d.channel.suspicions[Endpoint(HOST, nobody.channel.port)] = "perhaps the cluster keys differ"
    nobody.crash()
    d.open_destination(nobody.ticket(), 8, BLOCKS)
    world.pass_time(10.0)
    assert d.failures == {
        "d": f"the prefill side at {HOST}:{nobody.channel.port} is gone: perhaps the cluster keys differ"
    }
    world.check()


def test_what_is_seldom_told_is_told_whole() -> None:
    now_s = 0.0
    seldom = Seldom(lambda: now_s)
    assert [seldom.add(), seldom.add(), seldom.add(3)] == [1, 0, 0]
    now_s = INTERVAL_S
    assert seldom.add() == 5
    assert seldom.add() == 0

"""A decode side that was refused may ask again; what it asked before stays refused, however late it comes."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from kvbaton.protocol.messages import Register, decode_side
from kvbaton.protocol.params import DecodeTicket
from kvbaton.runtime import source
from kvbaton.runtime.events import DestinationOpened
from kvbaton.runtime.sidechannel import Received
from kvbaton.types import Direction, EngineId, RequestId, TransferId
from tests.runtime.memory_channel import MemoryChannel
from tests.runtime.world import BLOCK_SIZE, TID, Engine, World

NUM_TOKENS = 4 * BLOCK_SIZE
P_BLOCKS, D_BLOCKS, OTHER_BLOCKS = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]

both_directions = pytest.mark.parametrize("direction", list(Direction))


def to_another_engine(ticket: DecodeTicket) -> DecodeTicket:
    return msgspec.structs.replace(ticket, engine_id=EngineId("an earlier life"))


def without_blocks(d: Engine, ticket: DecodeTicket) -> None:
    d.expected[RequestId("first")] += 1
    d.driver.submit([DestinationOpened(ticket, RequestId("first"), 0, NUM_TOKENS, ())])


def at_another_engine(d: Engine, ticket: DecodeTicket) -> None:
    d.open_destination(to_another_engine(ticket), NUM_TOKENS, D_BLOCKS, rid="first")


@both_directions
@pytest.mark.parametrize("refused", [without_blocks, at_another_engine])
def test_the_second_attempt_with_the_same_transfer_delivers(
    direction: Direction, refused: Callable[[Engine, DecodeTicket], None]
) -> None:
    """Found with real engines: a ticket with a wrong engine id made the good one fail as well."""
    world = World()
    p, d = world.pair()
    p.prefill(NUM_TOKENS, P_BLOCKS)
    refused(d, p.ticket(direction))
    world.run()
    assert RequestId("first") in d.failures
    d.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS)
    world.run()
    assert RequestId("d") not in d.failures
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()


@both_directions
def test_whoever_was_one_too_many_may_come_again(direction: Direction, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_TRANSFERS_PER_READER", 1)
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(direction, TransferId("other")), NUM_TOKENS, OTHER_BLOCKS, rid="other")
    world.run()
    d.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS, rid="first")
    world.run()
    assert "more are not taken" in d.failures[RequestId("first")]
    p.prefill(NUM_TOKENS, [13, 14, 15, 16], TransferId("other"), "other p")
    world.run()
    d.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS)
    p.prefill(NUM_TOKENS, P_BLOCKS)
    world.run()
    assert RequestId("d") not in d.failures
    assert d.holds(D_BLOCKS, p, P_BLOCKS)
    world.check()


@both_directions
def test_a_refused_registration_that_comes_again_is_refused_again(
    direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sender has given the blocks back when it heard the first refusal."""
    monkeypatch.setattr(source, "MAX_TRANSFERS_PER_READER", 0)
    world = World()
    p, d = world.pair()
    assert isinstance(p.channel, MemoryChannel)
    said: list[bytes] = []
    receive = p.channel.receive

    def overhear() -> list[Received]:
        news = receive()
        said.extend(each.data for each in news if isinstance(decode_side(each.data), Register))
        return news

    monkeypatch.setattr(p.channel, "receive", overhear)
    d.open_destination(p.ticket(direction), NUM_TOKENS, D_BLOCKS)
    world.run()
    assert RequestId("d") in d.failures
    monkeypatch.setattr(source, "MAX_TRANSFERS_PER_READER", 100)
    (caller,) = world.network.callers
    p.prefill(NUM_TOKENS, P_BLOCKS)
    p.channel._mailbox.append(Received(caller, said[0]))
    world.run()
    assert not p.driver._source._transfers[TID].readers
    world.pass_time(60)
    d.may_change.clear()
    world.check()

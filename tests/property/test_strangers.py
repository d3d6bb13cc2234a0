"""Whatever a stranger says to a running engine, nobody else's transfer changes, and after a while nothing is left of it.

A stranger knows the engines' names and addresses, but not the ids of transfers that are not its own: those are what a
member of the cluster is told by the router, and by nobody else.
"""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.errors import PeerLost
from kvbaton.protocol.messages import Hello, Offer, Register, Renew, SideMessage, encode
from kvbaton.protocol.params import DecodeTicket
from kvbaton.runtime.peers import IDLE_S
from kvbaton.runtime.sidechannel import Caller, Endpoint
from kvbaton.types import Direction, EngineId, TransferId
from tests.property.test_wire import hellos, side
from tests.runtime.memory_channel import HOST, MemoryChannel
from tests.runtime.world import TID, Engine, World

NUM_TOKENS = 32
THEIRS = TransferId("stranger's")
LONG_S = 200.0

payloads = st.lists(st.binary(max_size=60) | side, min_size=1, max_size=6)


class Stranger:
    """Has a channel, and a name, rank and transport that it can introduce itself by; takes no part in the protocol."""

    def __init__(self, world: World) -> None:
        self.channel = MemoryChannel(world.network)
        self.engine = Engine(world, "S")  # not one of the world's: it never takes a turn

    def message(self, payload: bytes | SideMessage, *, is_plausible: bool, to_engine: str) -> bytes:
        """`payload` as bytes, about a transfer of its own; a plausible one gets past the first checks."""
        if isinstance(payload, bytes):
            return payload
        changes: dict[str, object] = {}
        if hasattr(payload, "transfer_id"):
            changes["transfer_id"] = THEIRS if is_plausible or payload.transfer_id == TID else payload.transfer_id
        if is_plausible:
            changes |= self._plausible(payload, to_engine)
        return encode(msgspec.structs.replace(payload, **changes))

    def _plausible(self, payload: SideMessage, to_engine: str) -> dict[str, object]:
        hello: Hello = self.engine.rank.hello
        fields = {"to_engine_id": to_engine, "from_incarnation": hello.incarnation, "hello": hello}
        return {key: value for key, value in fields.items() if hasattr(payload, key)}


def hear_all(stranger: Stranger) -> list[Caller | Endpoint]:
    return [received.route for received in stranger.channel.receive()]


def begin(world: World, direction: Direction) -> tuple[Engine, Engine]:
    """A transfer of which both sides know, half computed."""
    p, d = world.pair()
    d.open_destination(p.ticket(direction), NUM_TOKENS, list(range(1, 9)))
    p.open_source()
    p.advance(NUM_TOKENS // 2, [1, 2, 3, 4], last=False)
    world.run()
    return p, d


def end(world: World, p: Engine, d: Engine) -> None:
    p.advance(NUM_TOKENS, list(range(1, 9)))
    p.finish()
    world.run()
    assert d.failures.get("d") is None  # type: ignore[call-overload]
    assert d.holds(list(range(1, 9)), p, list(range(1, 9)))


def leave(world: World) -> None:
    world.pass_time(LONG_S, step_s=5.0)
    world.check()
    world.pass_time(IDLE_S + 10.0, step_s=20.0)
    assert [len(each.rank.peers) for each in world.engines] == [0, 0]


@given(st.sampled_from(Direction), st.lists(st.tuples(payloads, st.booleans()), min_size=1, max_size=4))
@settings(max_examples=100)
def test_a_caller_changes_nothing(direction: Direction, story: list[tuple[list[bytes | SideMessage], bool]]) -> None:
    world = World()
    p, d = begin(world, direction)
    stranger = Stranger(world)
    for said, is_plausible in story:
        for engine in (p, d):
            for payload in said:
                data = stranger.message(payload, is_plausible=is_plausible, to_engine=engine.name)
                stranger.channel.send(Endpoint(HOST, engine.channel.port), data)
        world.run()
    end(world, p, d)
    leave(world)


@given(
    st.sampled_from(Direction),
    st.sampled_from(Direction),
    st.lists(st.tuples(payloads, st.booleans()), min_size=1, max_size=4),
)
@settings(max_examples=100)
def test_one_that_is_called_changes_no_transfer_but_its_own(
    direction: Direction, asked: Direction, story: list[tuple[list[bytes | SideMessage], bool]]
) -> None:
    """A decode side asks it for KV, as somebody's params told it to; that request may end in any way, once."""
    world = World()
    p, d = begin(world, direction)
    stranger = Stranger(world)
    ticket = DecodeTicket(THEIRS, EngineId("S"), HOST, stranger.channel.port, 1, 1, asked)
    d.open_destination(ticket, NUM_TOKENS, list(range(11, 19)), rid="stranger")
    world.run()
    route = hear_all(stranger)[0]
    for said, is_plausible in story:
        for payload in said:
            try:
                stranger.channel.send(route, stranger.message(payload, is_plausible=is_plausible, to_engine="D"))
            except PeerLost:
                break  # hung up on
        world.run()
    end(world, p, d)
    leave(world)


@given(hellos)
def test_an_introduction_of_any_content_is_refused_or_forgotten(hello: Hello) -> None:
    """Also one whose every name is right and only the rest is not."""
    world = World()
    p, d = begin(world, Direction.PUSH)
    stranger = Stranger(world)
    known = stranger.engine.rank.hello
    for each in (hello, msgspec.structs.replace(known, layout=hello.layout), msgspec.structs.replace(known, rank=1)):
        register = Register(THEIRS, "P", each.incarnation, Direction.PUSH, 0, 1, ((1,),), 1.0, hello=each)
        stranger.channel.send(Endpoint(HOST, p.channel.port), encode(register))
        stranger.channel.send(Endpoint(HOST, p.channel.port), encode(Renew(THEIRS, each.incarnation)))
        world.run()
    end(world, p, d)
    leave(world)


def test_an_offer_of_blocks_outside_the_strangers_memory_fails_that_request_alone() -> None:
    world = World()
    p, d = begin(world, Direction.PULL)
    stranger = Stranger(world)
    ticket = DecodeTicket(THEIRS, EngineId("S"), HOST, stranger.channel.port, 1, 1, Direction.PULL)
    d.open_destination(ticket, NUM_TOKENS, list(range(11, 19)), rid="stranger")
    world.run()
    offer = Offer(THEIRS, NUM_TOKENS, (tuple(range(100, 108)),), 30.0, stranger.engine.rank.hello)
    stranger.channel.send(hear_all(stranger)[0], encode(offer))
    world.run()
    end(world, p, d)
    leave(world)
    assert list(d.failures) == ["stranger"]

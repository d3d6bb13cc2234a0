"""Coverage-guided fuzzing of everything that reads a stranger's bytes: run by `scripts/fuzz SECONDS`.

Each input is one message: its first byte says how it comes in (to a prefill or a decode side from a caller, from an address
that a decode side calls, or through the transport), the rest is the message. Two engines with transfers of their own hear
it. Nothing may raise, and after a while of virtual time those transfers have ended well and nothing is left of the rest.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
import uuid
from pathlib import Path

import msgspec

from kvbaton.errors import PeerLost
from kvbaton.protocol.messages import (
    Accepted,
    Cancel,
    Confirm,
    Connected,
    Ended,
    Greeting,
    HelloWanted,
    Notification,
    Offer,
    Register,
    Release,
    Renew,
    SegmentLanded,
    SegmentPosted,
    SideMessage,
    encode,
)
from kvbaton.protocol.params import DecodeTicket
from kvbaton.runtime.peers import IDLE_S
from kvbaton.runtime.sidechannel import Caller, Endpoint
from kvbaton.transport.base import AgentName, Arrival
from kvbaton.types import Direction, EngineId, Outcome, RequestId, TransferId
from tests.runtime.memory_channel import HOST, MemoryChannel
from tests.runtime.world import Engine, World

NUM_TOKENS = 28
OURS = list(range(1, 8))
THEIRS = {Direction.PUSH: list(range(8, 15)), Direction.PULL: list(range(15, 22))}
ASKED = {Direction.PUSH: TransferId("t"), Direction.PULL: TransferId("u")}
MESSAGES_PER_WORLD = 1000
SECONDS_PER_MESSAGE = 0.05


class Target:
    """Two engines in the middle of a transfer that no stranger knows the id of, and a stranger's ways to reach them."""

    def __init__(self) -> None:
        self.world = World()
        self.p, self.d = self.world.pair()
        self.secret = TransferId(uuid.uuid4().hex)
        self.channel = MemoryChannel(self.world.network)
        self.stranger = Engine(self.world, "S", incarnation="s")
        self.num_heard = self.num_asked = 0
        self.d.open_destination(self.p.ticket(tid=self.secret), NUM_TOKENS, OURS)
        self.p.open_source(self.secret)
        self.p.advance(16, OURS[:4], last=False, tid=self.secret)
        self.route: Caller | Endpoint = Caller(b"nobody yet")
        self._ask_stranger()

    def _ask_stranger(self) -> None:
        """Somebody's params send the decode side to the stranger, for either way of transfer."""
        open_ids = set(self.d.driver._destination._legs)
        for direction, tid in ASKED.items():
            if tid not in open_ids:
                self.num_asked += 1
                ticket = DecodeTicket(tid, EngineId("S"), HOST, self.channel.port, 1, 1, direction)
                self.d.open_destination(ticket, NUM_TOKENS, THEIRS[direction], rid=f"stranger {self.num_asked}")
        self.world.run()

    def hear(self, data: bytes) -> None:
        how, payload = data[0] % 4, data[1:]
        if how == 0:
            self.channel.send(Endpoint(HOST, self.p.channel.port), payload)
        elif how == 1:
            self.channel.send(Endpoint(HOST, self.d.channel.port), payload)
        elif how == 2:
            self._answer(payload)
        else:
            self.d.transport._inbox.append(Arrival(AgentName("S/0/s"), payload))
        self.world.pass_time(SECONDS_PER_MESSAGE)
        self.num_heard += 1

    def _answer(self, payload: bytes) -> None:
        self._ask_stranger()
        for received in self.channel.receive():
            self.route = received.route
        with contextlib.suppress(PeerLost):  # that call is over
            self.channel.send(self.route, payload)

    def end(self) -> None:
        """The engines' own transfer is delivered, and after a while nothing is left."""
        self.p.advance(NUM_TOKENS, OURS, tid=self.secret)
        self.p.finish(self.secret)
        self.world.run()
        failure = self.d.failures.get(RequestId("d"))
        # A prefill side that answers, is given our blocks and falls silent is fenced off: the price is in docs/security.md.
        assert failure is None or "to fence off another peer" in failure, failure
        assert failure is not None or self.d.holds(OURS, self.p, OURS)
        self.world.pass_time(200.0, step_s=5.0)
        self.world.check()
        self.world.pass_time(IDLE_S + 10.0, step_s=20.0)
        assert [len(each.rank.peers) for each in self.world.engines] == [0, 0]


class Fuzzing:
    def __init__(self) -> None:
        self._target = Target()

    def one(self, data: bytes) -> None:
        if not data:
            return
        self._target.hear(data)
        if self._target.num_heard >= MESSAGES_PER_WORLD:
            self._target.end()
            self._target = Target()


def seeds() -> list[bytes]:
    """One input per message and way in, each of which gets past the first checks."""
    hello = Engine(World(), "S", incarnation="s").rank.hello
    messages: list[SideMessage | Notification] = [Connected(), Greeting()]
    for direction, tid in ASKED.items():
        blocks = (tuple(THEIRS[direction]),)
        messages += [
            Register(tid, "P", "s", direction, 0, NUM_TOKENS, blocks, 1.0, hello=hello),
            Register(tid, "P", "s", direction, 0, NUM_TOKENS, blocks, 1.0),
            Renew(tid, "s"),
            Renew(tid, "s", 1),
            Cancel(tid, "s", "no"),
            Release(tid, "P", "no"),
            Accepted(tid),
            HelloWanted(tid),
            Confirm(tid, 1),
            Offer(tid, NUM_TOKENS, blocks, 1.0, hello),
            SegmentPosted(tid),
            SegmentLanded(tid, 0, 0, is_last=False),
            SegmentLanded(tid, 0, 1, is_last=True),
            *(Ended(tid, "s", outcome, "so") for outcome in Outcome),
        ]
    return [bytes([how]) + encode(message) for how in range(4) for message in messages]


def write_seeds(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds()):
        (folder / f"seed-{number}").write_bytes(seed)


INTERESTING: tuple[object, ...] = (
    None,
    True,
    -1,
    0,
    1,
    7,
    16,
    28,
    29,
    1 << 31,
    (1 << 63) - 1,
    (1 << 64) - 1,
    0.0,
    1e300,
    "",
    "t",
    "u",
    "s",
    "P",
    b"",
    [],
    {},
)


def mutate_fields(data: bytes, rng: random.Random) -> bytes | None:
    """One field of the message is another, or the message comes in another way; None for one time in four."""
    try:
        message = msgspec.msgpack.decode(data[1:])
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(message, dict) or not message or rng.randrange(4) == 0:
        return None
    how, target = data[0], message
    while nested := [value for value in target.values() if isinstance(value, dict) and value]:
        if rng.randrange(2):
            break
        target = rng.choice(nested)
    key = rng.choice(sorted(target, key=str))
    match rng.randrange(4):
        case 0:
            how = rng.randrange(4)
        case 1:
            del target[key]
        case 2 if isinstance(target[key], int) and not isinstance(target[key], bool):
            target[key] = max(-(1 << 63), min((1 << 64) - 1, target[key] + rng.randint(-2, 2)))
        case _:
            target[key] = rng.choice(INTERESTING)
    return bytes([how]) + msgspec.msgpack.encode(message)


def main(arguments: list[str]) -> None:
    import atheris  # noqa: PLC0415 - only here: the seeds are tested without it

    logging.disable(logging.CRITICAL)
    atheris.instrument_all()

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        mutated = mutate_fields(data, random.Random(seed))
        return atheris.Mutate(data, max_size) if mutated is None or len(mutated) > max_size else mutated

    atheris.Setup(arguments, Fuzzing().one, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    corpus = Path(sys.argv[1])
    write_seeds(corpus)
    main(sys.argv)

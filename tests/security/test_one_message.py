"""What one message of a buggy member, or of anybody where there is no key, makes an engine keep and write down.

Tests marked as expected failures are holes that are known and open; each fails loudly (strict) once it is closed.
"""

from __future__ import annotations

import logging

import msgspec
import pytest

from kvbaton.protocol.messages import Blocks, Ended, Hello, Register, SideMessage, decode_side, encode
from kvbaton.runtime.sidechannel import Endpoint
from kvbaton.types import Direction, Outcome
from tests.runtime.memory_channel import HOST, MemoryChannel
from tests.runtime.world import NUM_BLOCKS, Engine, World

MAX_LOG_CHARACTERS = 100_000
"""For fifty refusals: two thousand each, what a reason may have on the wire."""


class Sender:
    """Introduces itself correctly to P, and registers what the test wants."""

    def __init__(self) -> None:
        self.world = World()
        self.p = self.world.engine("P")
        self.hello: Hello = Engine(self.world, "S").rank.hello  # never takes a turn
        self.channel = MemoryChannel(self.world.network)

    def register(self, transfer_id: str, blocks: Blocks, *, hello: Hello | None = None) -> list[SideMessage]:
        """P's answers."""
        hello = hello or self.hello
        register = Register(transfer_id, "P", hello.incarnation, Direction.PUSH, 0, 8, blocks, 1.0, hello=hello)
        self.channel.send(Endpoint(HOST, self.p.channel.port), encode(register))
        self.world.run(self.p)
        return [decode_side(received.data) for received in self.channel.receive()]

    def with_model(self, model: str) -> Hello:
        return msgspec.structs.replace(self.hello, layout=msgspec.structs.replace(self.hello.layout, model=model))


def test_a_registration_of_blocks_the_sender_has_is_taken() -> None:
    """What the refusals below are measured against."""
    sender = Sender()
    assert not isinstance(sender.register("t", ((1, NUM_BLOCKS - 1),))[0], Ended)
    assert sender.p.num_transfers == 1


@pytest.mark.parametrize(
    "blocks",
    [((NUM_BLOCKS,),), ((1,),) * 5000, ((1,) * 1_000_000,)],
    ids=["an id outside its cache", "more groups than it has", "more blocks than it has"],
)
def test_a_registration_of_blocks_the_sender_cannot_have_is_refused_at_once(blocks: Blocks) -> None:
    """Else P keeps it (up to 16 MiB on the wire, several times that here) until a prefill or the lease ends it."""
    sender = Sender()
    (answer,) = sender.register("t", blocks)
    assert isinstance(answer, Ended)
    assert answer.outcome is Outcome.FAILED
    assert sender.p.num_transfers == 0


def test_refusals_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    sender = Sender()
    big = sender.with_model("x" * 100_000)
    with caplog.at_level(logging.INFO, "vllm.kvbaton"):
        for number in range(50):
            sender.register(f"t{number}", ((1,),), hello=big)
    assert caplog.messages
    assert sum(len(message) for message in caplog.messages) <= MAX_LOG_CHARACTERS


@pytest.mark.parametrize("control", ["\n", "\r", "\x1b[2J"], ids=["newline", "return", "escape"])
def test_no_text_of_a_peer_forges_a_line_of_the_log(control: str, caplog: pytest.LogCaptureFixture) -> None:
    """A transfer id comes from HTTP, a reason from a peer; neither begins a line of its own or commands a terminal."""
    sender = Sender()
    with caplog.at_level(logging.INFO, "vllm.kvbaton"):
        sender.register(f"t{control}ERROR forged", ((1,),), hello=sender.with_model("another"))
    assert caplog.messages
    assert not any(control[0] in message for message in caplog.messages)

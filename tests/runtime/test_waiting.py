"""Who waits for whom: the sentences, and that both ends say them at the right time, once."""

from __future__ import annotations

import logging

import pytest

from kvbaton.protocol.rendezvous import State
from kvbaton.runtime.waiting import BlocksWait, KVWait, ReaderWait, decode_sentence, prefill_sentence
from kvbaton.types import Direction
from tests.runtime.world import World

PUSH, PULL = Direction.PUSH, Direction.PULL


def kv(waited_s: float = 5.1, direction: Direction = PUSH, state: State = State.OFFERED, **facts: object) -> KVWait:
    given = {"is_accepted": True, "heard_ago_s": 1.2} | facts
    return KVWait("t", waited_s, direction, "E/0", "10.0.0.1:5600", state, **given)  # type: ignore[arg-type]


def at_e(rest: str, waited: str = "5.1 s") -> str:
    return f"Transfer t: the decode side has waited {waited} for prefill rank E/0 at 10.0.0.1:5600 {rest}"


@pytest.mark.parametrize(
    ("wait", "sentence"),
    [
        (kv(), at_e("(registered, accepted; no segment has arrived; connection up, last heard 1.2 s ago)")),
        (kv(num_arrived=1), at_e("(registered, accepted; 1 segment arrived; connection up, last heard 1.2 s ago)")),
        (
            kv(is_accepted=False, heard_ago_s=None, waited_s=75.4),
            at_e("(registered, not accepted yet; nothing heard from it yet)", "75 s"),
        ),
        (kv(is_accepted=False, has_line=False), at_e("(registered, not accepted yet; no connection)")),
        (
            kv(direction=PULL, state=State.OPEN),
            at_e("(registered, accepted; its blocks are not offered yet; connection up, last heard 1.2 s ago)"),
        ),
        (
            kv(direction=PULL, state=State.POSTING, num_in_flight=2),
            at_e("(offered; 2 segments being read; connection up, last heard 1.2 s ago)"),
        ),
        (
            kv(num_other_ranks=1),
            at_e(
                "and 1 other rank (registered, accepted; no segment has arrived; connection up, last heard 1.2 s ago)"
            ),
        ),
        (
            kv(state=State.DRAINING, ended_because="the decode request was given up"),
            (
                "Transfer t: given up (the decode request was given up), but its blocks have waited 5.1 s until nothing can "
                "touch them: E/0 has not said that it stopped; connection up, last heard 1.2 s ago"
            ),
        ),
        (
            kv(direction=PULL, state=State.DRAINING, num_in_flight=1, ended_because="x"),
            (
                "Transfer t: given up (x), but its blocks have waited 5.1 s until nothing can touch them: the transport still "
                "reads 1 segment; connection up, last heard 1.2 s ago"
            ),
        ),
    ],
)
def test_the_decode_side_says(wait: KVWait, sentence: str) -> None:
    assert decode_sentence(wait) == sentence


def blocks(num_blocks: int = 37, num_registered: int = 1, **facts: object) -> BlocksWait:
    return BlocksWait("t", 5.0, "r", num_blocks, num_registered, **facts)  # type: ignore[arg-type]


def reader(direction: Direction = PUSH, state: State = State.POSTING, **facts: object) -> ReaderWait:
    return ReaderWait("D/1", direction, state, **facts)  # type: ignore[arg-type]


HELD = "Transfer t: 37 blocks of request r have been held for 5.0 s: "


@pytest.mark.parametrize(
    ("wait", "sentence"),
    [
        (blocks(num_registered=0), HELD + "no decode side has registered"),
        (blocks(num_readers=2), HELD + "1 of 2 decode ranks have registered"),
        (
            blocks(slowest=reader(num_posted=3, num_in_flight=1, heard_ago_s=0.24)),
            HELD + "3 segments posted to decode rank D/1, 1 in flight (last heard 0.2 s ago)",
        ),
        (
            blocks(slowest=reader(is_asked=True)),
            HELD + "decode rank D/1 was asked whether it still wants them and has not answered (nothing heard from it "
            "that is known to be fresh)",
        ),
        (
            blocks(slowest=reader(PULL, State.OFFERED, heard_ago_s=2.0)),
            HELD + "decode rank D/1 has been offered them and has not finished reading (last heard 2.0 s ago)",
        ),
        (
            blocks(slowest=reader(state=State.DRAINING, num_in_flight=2, heard_ago_s=2.0)),
            HELD + "decode rank D/1 is given up, with 2 segments in flight (last heard 2.0 s ago)",
        ),
        (
            blocks(slowest=reader(PULL, State.DRAINING, heard_ago_s=2.0)),
            HELD + "decode rank D/1 is given up, with its answer missing (last heard 2.0 s ago)",
        ),
        (
            BlocksWait("t", 5.0, None, slowest=reader(state=State.OPEN)),
            (
                "Transfer t: decode rank D/1 has registered and waited 5.0 s for the prefill request, which has not come to "
                "this engine"
            ),
        ),
    ],
)
def test_the_prefill_side_says(wait: BlocksWait, sentence: str) -> None:
    assert prefill_sentence(wait) == sentence


def waits(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    found = [(each.levelno, each.getMessage()) for each in caplog.records if "transition" not in each.getMessage()]
    caplog.clear()
    return found


def test_held_blocks_are_said_once_at_five_seconds_and_nothing_before(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm.kvbaton")
    world = World()
    p, _ = world.pair()
    p.prefill(8, [1, 2])
    world.pass_time(4)
    assert waits(caplog) == []
    world.pass_time(20)
    assert waits(caplog) == [
        (logging.INFO, "Transfer t: 2 blocks of request p have been held for 5.0 s: no decode side has registered.")
    ]
    world.pass_time(30)
    world.check()


@pytest.mark.parametrize("direction", [PUSH, PULL])
def test_a_decode_side_without_prefill_is_said_at_both_ends(
    direction: Direction, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm.kvbaton")
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(direction), 8, [3, 4])
    world.run()
    world.pass_time(6)
    said = [text for _, text in waits(caplog)]
    progress = "no segment has arrived" if direction is PUSH else "its blocks are not offered yet"
    assert said == [
        (
            "Transfer t: decode rank D/0 has registered and waited 5.0 s for the prefill request, which has not come to this "
            "engine."
        ),
        (
            f"Transfer t: the decode side has waited 5.0 s for prefill rank P/0 at {p.ticket().host}:{p.channel.port} "
            f"(registered, accepted; {progress}; connection up, last heard 1.0 s ago)."
        ),
    ]
    p.prefill(8, [1, 2])
    world.run()
    world.pass_time(10)
    assert waits(caplog) == []
    assert not d.failures
    world.check()


def test_a_very_long_wait_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm.kvbaton")
    world = World()
    p, d = world.pair()
    p.open_source()
    d.open_destination(p.ticket(), 8, [3, 4])
    world.run()
    world.pass_time(61)
    levels = [(level, text[:48]) for level, text in waits(caplog)]
    said = "Transfer t: the decode side has waited "
    assert levels == [
        (logging.INFO, f"{said}5.0 s for"[:48]),
        (logging.WARNING, f"{said}30.0 s fo"[:48]),
        (logging.WARNING, f"{said}60 s for p"[:48]),
    ]

"""Every transition is told once, to the log and the timeline alike, and to nobody who does not want it."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from kvbaton.protocol.rendezvous import Deadlines, Input, Rendezvous, State
from kvbaton.runtime import metrics
from kvbaton.runtime.journal import Journal
from kvbaton.runtime.metrics import Why
from kvbaton.types import Direction, End, EngineId, Outcome, TransferId
from tests.runtime.world import TID, World

LOG = "vllm.kvbaton"


@dataclass
class Party:
    end: End = End.SOURCE
    transfer_id: TransferId = TID
    rendezvous: Rendezvous = field(default_factory=lambda: Rendezvous(Deadlines(), 10.0))
    name: str | None = "E/0"

    @property
    def peer_name(self) -> str:
        assert self.name is not None, "nobody wants to know"
        return self.name


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.getMessage().startswith("transition")]


def test_a_transition_is_one_line_and_one_event(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, LOG)
    path = tmp_path / "trace.jsonl"
    journal, party = Journal(str(path)), Party()
    journal.feed(party, Input.POSTS, 10.5)
    journal.feed(party, Input.POSTS, 10.6)  # absorbed: no transition
    journal.feed(party, Input.FAIL, 12.0, "a write failed")
    journal.close()
    start = "transition transfer_id=t end=prefill peer=E/0"
    assert lines(caplog) == [
        f"{start} from_state=open to_state=posting input=posts elapsed_s=0.5",
        f'{start} from_state=posting to_state=draining input=fail elapsed_s=1.5 outcome=failed reason="a write failed"',
    ]
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [event.pop("t_unix_s") > 0 for event in events] == [True, True]
    assert events[1] == {
        "who": "prefill",
        "event": "transition",
        "transfer_id": "t",
        "end": "prefill",
        "peer": "E/0",
        "from_state": "posting",
        "to_state": "draining",
        "input": "fail",
        "elapsed_s": 1.5,
        "outcome": "failed",
        "reason": "a write failed",
    }


def test_when_nobody_listens_nothing_is_formatted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOG)
    party = Party(name=None)
    Journal().feed(party, Input.POSTS, 11.0)
    Journal().feed(party, Input.COMPLETE, 12.0)
    assert party.rendezvous.state is State.CLOSED
    assert not lines(caplog)


@pytest.mark.parametrize(
    ("end", "what", "level"),
    [
        (End.DESTINATION, Input.EXPIRE, logging.WARNING),
        (End.DESTINATION, Input.CANCEL, logging.INFO),
        (End.SOURCE, Input.EXPIRE, logging.INFO),
        (End.DESTINATION, Input.COMPLETE, logging.DEBUG),
    ],
)
def test_an_abnormal_end_is_told_to_the_operator(
    end: End, what: Input, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, LOG)
    party = Party(end)
    Journal().feed(party, what, 11.0)
    assert [each.levelno for each in caplog.records] == [level]


def test_what_came_from_outside_cannot_begin_a_line_or_a_field(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, LOG)
    party = Party(transfer_id=TransferId("t end=decode\ntransition"), name='E"\x1b[31m/0')
    Journal().feed(party, Input.FAIL, 11.0, 'x\ntransition transfer_id=other "quoted"')
    (line,) = lines(caplog)
    assert "\n" not in line
    assert "\x1b" not in line
    assert line.startswith(r'transition transfer_id="t end=decode\ntransition" end=prefill peer="E\"\u001b[31m/0" ')
    assert line.endswith(r'reason="x\ntransition transfer_id=other \"quoted\""')


def test_the_class_of_the_first_reason_is_counted_once_per_transfer() -> None:
    journal, first, second = Journal(), Party(), Party()
    journal.feed(first, Input.FAIL, 11.0, "the transport ...", why=Why.NOT_MOVED)
    journal.feed(second, Input.CANCEL, 11.0, "taken along")
    journal.ended(End.SOURCE, TransferId("t"), Outcome.FAILED, direction=Direction.PULL, reason="the transport ...")
    journal.ended(End.SOURCE, TransferId("u"), Outcome.EXPIRED, direction=None, reason="nobody came", is_held=True)
    taken = journal.tally.take(0.0)
    assert taken is not None
    assert taken.counted == {
        "transfers|prefill|pull|failed": 1,
        "transfers_undelivered|prefill|failed|not_moved": 1,
        "transfers|prefill|unknown|expired": 1,
        "transfers_undelivered|prefill|expired|other": 1,
        metrics.EXPIRED.key(): 1,
    }


def walk(caplog: pytest.LogCaptureFixture, end: str) -> list[str]:
    """The transitions that were logged of one end, each as `from>to`."""
    pattern = rf"end={end} .*from_state=(\w+) to_state=(\w+)"
    return [f"{found[1]}>{found[2]}" for line in lines(caplog) if (found := re.search(pattern, line))]


@pytest.mark.parametrize("direction", list(Direction))
def test_both_ends_tell_their_whole_way(direction: Direction, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, LOG)
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(direction), 8, [3, 4])
    p.prefill(8, [1, 2])
    world.run()
    posting, offering = ["open>posting", "posting>closed"], ["open>offered", "offered>closed"]
    claim = ["open>closed"]
    is_push = direction is Direction.PUSH
    assert sorted(walk(caplog, "prefill")) == sorted(claim + (posting if is_push else offering))
    assert walk(caplog, "decode") == (offering if is_push else posting)
    mover, waiter = (p, d) if is_push else (d, p)
    taken, other = (each.rank.journal.tally.take(world.now_s) for each in (mover, waiter))
    assert taken is not None
    assert other is not None
    assert taken.observed["bytes_transferred"] == [2 * 2 * 48]
    assert taken.observed["num_segments"] == [1]
    assert taken.observed.get("overlap_ratio") == ([0.0] if is_push else None)
    assert set(taken.observed) - {"num_segments", "overlap_ratio"} == {
        "post_time_seconds", "xfer_time_seconds", "bytes_transferred", "num_descriptors",
    }  # fmt: skip
    assert not other.observed
    for snapshot, side in ((taken, "prefill" if is_push else "decode"), (other, "decode" if is_push else "prefill")):
        assert snapshot.counted == {f"transfers|{side}|{direction.value}|delivered": 1}
        assert snapshot.gauges[f"waiting_transfers|{side}"] == 0
    world.check()


def test_what_was_written_while_the_prompt_was_computed_is_the_overlap() -> None:
    world = World()
    p, d = world.pair()
    d.open_destination(p.ticket(), 16, [5, 6, 7, 8])
    p.open_source()
    p.advance(12, [1, 2, 3], last=False)
    world.run()
    p.advance(16, [1, 2, 3, 4])
    p.finish()
    world.run()
    taken = p.rank.journal.tally.take(world.now_s)
    assert taken is not None
    assert taken.observed["overlap_ratio"] == [0.75]
    assert taken.observed["num_segments"] == [2]
    world.check()


def test_blocks_are_pinned_from_the_engines_end_of_the_request_until_the_transfers() -> None:
    world = World()
    p, d = world.pair()
    p.prefill(8, [1, 2])
    world.run()
    assert pinned(world) == (2, 0)
    d.open_destination(p.ticket(), 8, [3, 4, 5])
    d.turn()
    assert pinned(world) == (2, 3)
    world.run()
    assert pinned(world) == (0, 0)
    world.check()


def pinned(world: World) -> tuple[float, float]:
    p, d = (each.rank.journal.tally._gauges(world.now_s) for each in world.engines)
    return p["pinned_blocks|prefill"], d["pinned_blocks|decode"]


def test_refusals_are_counted_by_class_and_what_they_cost_at_the_other_end() -> None:
    world = World()
    p, d = world.pair()
    d.open_destination(msgspec.structs.replace(p.ticket(), engine_id=EngineId("somebody else")), 8, [3, 4])
    world.run()
    taken = p.rank.journal.tally.take(world.now_s)
    assert taken is not None
    assert taken.counted == {"registrations_refused|wrong_engine": 1}
    got = d.rank.journal.tally.take(world.now_s)
    assert got is not None
    assert got.counted["transfers_undelivered|decode|failed|peer_ended"] == 1
    world.check()

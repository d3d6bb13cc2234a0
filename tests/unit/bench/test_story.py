"""`kvbaton timeline`: what is shown of files that hold one transfer, several, or none of that name."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from kvbaton import cli
from kvbaton.bench import story
from kvbaton.errors import UsageError

E, D = "3a9e639a-c9cf-4797-b271-772caf243d3b", "pinned"
AT_S = 1796070000.0


def file(path: Path, *events: dict[str, object]) -> str:
    lines = [{"t_unix_s": AT_S + float(str(event.pop("at"))), "transfer_id": "abc-1", **event} for event in events]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"t_unix_s": 1, "who"')
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    p, d = {"who": "prefill"}, {"who": "decode"}
    seen_by_p = {"from_state": "open", "to_state": "closed", "input": "complete", "elapsed_s": 0.0213}
    unregistered = {"event": "transition", "peer": "unregistered", "outcome": "delivered", **seen_by_p}
    posted = {"segment": 0, "num_bytes": 8_390_000, "num_descriptors": 8, "plan_s": 0.0007, "post_s": 0.0097}
    return [
        file(
            tmp_path / "p.jsonl",
            p | {"at": 0.042, "event": "queued", "request_id": "cmpl-r7-0"},
            p | {"at": 0.050, "event": "destination_known", "direction": "push", "peer": f"{D}/0"},
            p | {"at": 0.051} | unregistered,
            p | {"at": 0.499, "event": "segment_posted", "peer": f"{D}/0"} | posted,
        ),
        file(
            tmp_path / "d.jsonl",
            d | {"at": 0.046, "event": "registered", "direction": "push", "num_blocks": 64, "num_tokens": 2046},
            d | {"at": 31.0, "event": "closed", "outcome": "expired", "reason": "no progress", "num_bytes": 0},
        ),
        file(
            tmp_path / "router.jsonl",
            {"who": "router", "at": 0.0, "event": "received", "request_id": "r7", "direction": "push"},
            {"who": "router", "at": 31.5, "event": "finished", "request_id": "r7", "status": 500},
        ),
    ]


def shown(*arguments: str) -> str:
    out = io.StringIO()
    assert story.main(arguments, out) == 0
    return out.getvalue()


def test_one_transfers_events_over_all_files_in_order(files: list[str]) -> None:
    assert shown(*files).splitlines() == [
        "abc-1: push, expired, 8 events",
        "        ms       +ms  who      event",
        "       0.0       0.0  router   received                     push, r7",
        "      42.0      42.0  prefill  queued                       cmpl-r7-0",
        "      46.0       4.0  decode   registered                   push, 2046 tokens, 64 blocks",
        "      50.0       4.0  prefill  destination_known            push, peer pinned/0",
        "      51.0       1.0  prefill  unregistered: open > closed  complete, after 21.3 ms",
        (
            "     499.0     448.0  prefill  segment_posted               segment 0, 8.39 MB, 8 descriptors, planned in "
            "0.7 ms, posted in 9.7 ms, peer pinned/0"
        ),
        "  31,000.0  30,501.0  decode   closed                       expired, no progress",
        "  31,500.0     500.0  router   finished                     HTTP 500",
    ]


def test_of_several_transfers_a_list_and_one_by_id_its_beginning_or_a_request(files: list[str], tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    event = {"who": "decode", "event": "closed", "outcome": "delivered", "transfer_id": "abd-2", "request_id": "r8"}
    other.write_text(json.dumps({"t_unix_s": AT_S + 40, **event}) + "\n")
    files.append(str(other))
    assert shown(*files).splitlines() == [
        "transfer  direction                seen by    outcome  events      ms",
        "--------  ---------  ---------------------  ---------  ------  ------",
        "abc-1     push       router+prefill+decode    expired       8  31,500",
        "abd-2     -                         decode  delivered       1       0",
        "Name a transfer, or the beginning of its id, after the files to see its events.",
    ]
    for wanted in ("abd-2", "abd", "r8"):
        assert shown(*files, wanted).startswith("abd-2: -, delivered, 1 events")
    with pytest.raises(UsageError, match=r"2 transfers match 'ab': abc-1, abd-2"):
        shown(*files, "ab")
    with pytest.raises(UsageError, match="no transfer of id 'zzz'"):
        shown(*files, "zzz")


def test_only_the_newest_of_very_many_are_listed(tmp_path: Path) -> None:
    lines = [
        json.dumps({"t_unix_s": AT_S + number, "who": "decode", "event": "queued", "transfer_id": f"t{number}"})
        for number in range(50)
    ]
    path = tmp_path / "many.jsonl"
    path.write_text("\n".join(lines))
    text = shown(str(path))
    assert "t49 " in text
    assert "t9 " not in text
    assert "10 older ones are not shown." in text


def test_an_engine_id_that_vllm_made_up_is_cut(tmp_path: Path) -> None:
    event = {"at": 0.0, "who": "decode", "event": "segment_arrived", "segment": 1, "peer": f"{E}/2"}
    assert shown(file(tmp_path / "d.jsonl", event)).endswith("segment_arrived  segment 1, peer 3a9e639a/2\n")


def test_a_file_that_is_not_there_and_one_without_events_are_usage_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["timeline", str(tmp_path / "nowhere.jsonl")]) == 2
    assert "nowhere.jsonl: no such file" in capsys.readouterr().err
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert cli.main(["timeline", str(empty)]) == 2
    assert "no events in" in capsys.readouterr().err


def test_the_command_writes_to_the_terminal(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["timeline", *files]) == 0
    assert capsys.readouterr().out.startswith("abc-1: push, expired, 8 events\n")

"""The timeline: one JSON line per event, and never a reason for a transfer to fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvbaton.runtime.trace import Trace
from kvbaton.types import TransferId

T = TransferId("t")


def test_two_writers_of_one_file_do_not_tear_each_others_lines(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    first, second = Trace(str(path), "prefill"), Trace(str(path), "decode")
    for number in range(100):
        first.emit("segment_posted", T, segment=number)
        second.emit("segment_arrived", T, segment=number)
    for trace in (first, second):
        trace.close()
        trace.close()  # idempotent
        trace.emit("closed", T)  # and silent after it
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 200
    assert lines[1] == {
        "t_unix_s": lines[1]["t_unix_s"],
        "who": "decode",
        "event": "segment_arrived",
        "transfer_id": "t",
        "segment": 0,
    }


def test_without_a_path_nothing_is_written() -> None:
    Trace(None, "prefill").emit("closed", T)


def test_a_file_that_cannot_be_opened_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = Trace(str(tmp_path / "nowhere" / "trace.jsonl"), "prefill")
    trace.emit("closed", T)
    assert "No timeline is written" in caplog.text


def test_a_full_disk_ends_the_timeline_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    trace = Trace("/dev/full", "prefill")
    for _ in range(3):
        trace.emit("closed", T)
    assert caplog.text.count("The timeline ends here") == 1
    trace.close()

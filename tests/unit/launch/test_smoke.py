"""What the traces say after the first request."""

from __future__ import annotations

import json
from pathlib import Path

from kvbaton.launch.smoke import _why_not, moved


def trace(folder: Path, *events: dict[str, object]) -> Path:
    path = folder / "decode-0.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events) + '{"event": "clo')
    return path


def test_the_reason_of_an_undelivered_transfer_is_told(tmp_path: Path) -> None:
    reason = "block size differs: [64] on this engine, [32] on the peer."
    path = trace(tmp_path, {"event": "queued"}, {"event": "closed", "outcome": "failed", "reason": reason})
    assert reason in _why_not([path])


def test_a_delivered_transfer_has_no_complaint(tmp_path: Path) -> None:
    path = trace(tmp_path, {"event": "closed", "outcome": "delivered", "reason": "complete"})
    assert _why_not([path, tmp_path / "absent.jsonl"]) == ""


def test_segments_are_summed(tmp_path: Path) -> None:
    path = trace(tmp_path, *[{"event": "segment_moved", "num_bytes": 5, "move_s": 0.5}] * 2)
    found = moved([path])
    assert found is not None
    assert (found.num_bytes, found.move_s, found.segments) == (10, 1.0, 2)

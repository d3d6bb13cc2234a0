"""`kvbaton demo --quick` with real engines and the tiny model, as somebody runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from kvbaton.bench.records import Report
from kvbaton.launch.identity import Identity

pytestmark = [pytest.mark.engines, pytest.mark.nixl, pytest.mark.timeout(900)]

DEMO = [sys.executable, "-m", "kvbaton", "demo", "--model", "tiny", "--quick"]
PATIENCE_S = 850.0
LEAST_PNG_BYTES = 5_000


def left(token: str) -> list[int]:
    """Processes with that variable in their environment."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            content = environ.read_bytes()
        except OSError:
            continue
        if token.encode() in content and Identity.of(int(environ.parent.name)):
            found.append(int(environ.parent.name))
    return found


def demo(tmp_path: Path) -> tuple[subprocess.Popen[str], str]:
    token = f"KVBATON_TEST={uuid.uuid4().hex}"
    places = ["--out", str(tmp_path / "out"), "--state-dir", str(tmp_path / "state")]
    environment = os.environ | dict([token.split("=")])
    process = subprocess.Popen(
        [*DEMO, *places], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    return process, token


def test_the_demo_shows_and_writes_everything(tmp_path: Path) -> None:
    process, token = demo(tmp_path)
    try:
        out, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 0, out
    assert left(token) == []
    assert "exposed handoff" in out
    assert "not in the traces" not in out
    folder = tmp_path / "out"
    report = Report.decode((folder / "report.json").read_bytes())
    assert {mode.name for mode in report.modes} == {"aggregated", "kvbaton-pull", "kvbaton-push"}
    for mode in report.modes:
        figures = mode.runs[0].figures
        assert figures is not None
        assert (figures.completed, figures.failed) == (3, 0)
        assert figures.ttft_ms is not None
        assert figures.tpot_ms is not None
    assert report.environment.versions["vllm"]
    for name in ("timeline.png", "chart.png"):
        data = (folder / name).read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) > LEAST_PNG_BYTES
    summary = (folder / "summary.md").read_text()
    for expected in (
        "command: `kvbaton demo --model tiny --quick",
        "versions: ",
        "prefill",
        "kvbaton pull",
        "timeline.png",
    ):
        assert expected in summary


def test_ctrl_c_while_engines_start_leaves_nothing(tmp_path: Path) -> None:
    process, token = demo(tmp_path)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if "importing" in line:
                break
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, out
    assert left(token) == []
    assert not (tmp_path / "out").exists()

"""`kvbaton bench soak` with fake engines, the real router, and real kills."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbaton import cli
from kvbaton.bench import soak
from kvbaton.launch.identity import Identity

FAKE = shlex.join([sys.executable, str(Path(__file__).with_name("fake_soak_engine.py"))])
PATIENCE_S = 60.0

Left = Callable[[], list[int]]


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[Left]:
    """Processes that this test started, however far down, and that are still there."""
    token = f"KVBATON_TEST={uuid.uuid4().hex}"
    monkeypatch.setenv(*token.split("="))

    def find() -> list[int]:
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                content = environ.read_bytes()
            except OSError:
                continue
            if token.encode() in content and Identity.of(int(environ.parent.name)):
                found.append(int(environ.parent.name))
        return [pid for pid in found if pid != os.getpid()]

    yield find
    for pid in find():
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "_POOL_WAIT_S", 0.5)


def arguments(tmp_path: Path, *more: str) -> list[str]:
    model = tmp_path / "fake-model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text('{"vocab_size": 500}')
    return [
        *("bench", "soak", "--model", str(model), "--requests", "30", "--kills", "0", "--cores", "0,1"),
        *("--out", str(tmp_path / "out"), "--state-dir", str(tmp_path / "state"), "--engine-command", FAKE, *more),
    ]


def report_of(tmp_path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((tmp_path / "out" / "kvbaton" / "report.json").read_bytes())
    return report


def verdicts_of(tmp_path: Path) -> set[str]:
    return {attempt["verdict"] for attempt in report_of(tmp_path)["attempts"]}


def test_killed_engines_come_back_and_every_request_is_answered(tmp_path: Path, left: Left) -> None:
    code = cli.main(arguments(tmp_path, "--requests", "150", "--kills", "1"))
    report = report_of(tmp_path)
    assert code == 0, (tmp_path / "out" / "kvbaton" / "summary.md").read_text()
    assert [(kill["engine"], kill["is_ours"]) for kill in report["kills"]] == [("prefill-0", True), ("decode-0", True)]
    assert len({attempt["request"] for attempt in report["attempts"]}) == 150
    assert verdicts_of(tmp_path) <= {"right", "left", "failed"}
    assert all(pool["is_cache_reset"] and pool["usage"] == 0 for pool in report["pools"])
    assert not left()


@pytest.mark.parametrize(
    ("behaviour", "verdict", "complaint"),
    [
        ("wrong", "wrong", "with wrong tokens"),
        ("short", "dishonest", "with a dishonest failure"),
        ("hang", "hung", "hung"),
        ("leak", "right", "prefill-0 holds 50.00% of its blocks"),
        ("die", "right", "decode-0 died by itself"),
    ],
)
def test_a_broken_promise_is_found(
    tmp_path: Path, left: Left, monkeypatch: pytest.MonkeyPatch, behaviour: str, verdict: str, complaint: str
) -> None:
    monkeypatch.setenv("FAKE_BEHAVIOUR", behaviour)
    code = cli.main(arguments(tmp_path, "--deadline", "2", "--patience", "4", "--time-limit", "12"))
    assert code == 1
    assert verdict in verdicts_of(tmp_path)
    assert complaint in (tmp_path / "out" / "kvbaton" / "summary.md").read_text()
    assert not left()


def test_ctrl_c_writes_what_there_is_and_leaves_nothing(
    tmp_path: Path, left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_BEHAVIOUR", "slow")  # the soak is not over when its first line of progress is read
    words = arguments(tmp_path, "--requests", "800")
    with subprocess.Popen([sys.executable, "-m", "kvbaton", *words], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        give_up_at_s = time.monotonic() + PATIENCE_S
        while "kvbaton, push and pull " not in (line := child.stdout.readline()) or "ended" not in line:
            assert time.monotonic() < give_up_at_s
        child.send_signal(signal.SIGINT)
        said, _ = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 130
    assert "stopped by the user" in said
    report = report_of(tmp_path)
    assert 0 < len(report["attempts"]) < 800
    assert report["stopped"] == "stopped by the user"
    assert not left()


def test_the_same_soak_does_not_ask_for_expected_tokens_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments(tmp_path)) == 0
    assert "engine-0" in capsys.readouterr().out
    assert cli.main(arguments(tmp_path)) == 0
    assert "engine-0" not in capsys.readouterr().out

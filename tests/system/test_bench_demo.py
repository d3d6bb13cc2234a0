"""`kvbaton demo` with engines and router that are fake: what it writes, and what it does when something fails."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kvbaton import cli
from kvbaton.bench import conversation, demo, surroundings
from kvbaton.bench.modes import Setup
from kvbaton.bench.records import Report
from kvbaton.launch.identity import Identity

FAKE = (sys.executable, str(Path(__file__).with_name("fake_bench_engine.py")))
FILES = {"chart.png", "report.json", "summary.md"}
"""Fakes write no traces, so there is no timeline."""
PATIENCE_S = 60.0

Left = Callable[[], set[int]]


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[Left]:
    """Processes that this test started, however far down, and that are still there."""
    token = f"KVBATON_TEST={uuid.uuid4().hex}"
    monkeypatch.setenv(*token.split("="))

    def find() -> set[int]:
        found = set()
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                content = environ.read_bytes()
            except OSError:
                continue
            if token.encode() in content and Identity.of(int(environ.parent.name)):
                found.add(int(environ.parent.name))
        return found - {os.getpid()}

    yield find
    for pid in find():
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command line whose engines are fake."""
    model = tmp_path / "fake-model"
    model.mkdir()
    (model / "config.json").write_text('{"vocab_size": 500}')

    def setup(model: str, state_root: Path) -> Setup:
        return Setup(
            model=model,
            state_root=state_root,
            machine=surroundings.bench_machine(),
            cores=(0, 0),
            engine_command=FAKE,
            router_command=FAKE,
            trace=True,
        )

    monkeypatch.setattr(demo, "_setup", setup)
    monkeypatch.setattr(conversation, "_TRACE_PATIENCE_S", 0.2)
    places = ("--out", str(tmp_path / "out"), "--state-dir", str(tmp_path / "state"))
    return ["demo", "--model", str(model), "--quick", *places]


def written(tmp_path: Path) -> set[str]:
    folder = tmp_path / "out"
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def test_it_ends_with_files_and_can_be_repeated(
    tmp_path: Path, words: list[str], left: Left, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert cli.main(words) == 0
        out = capsys.readouterr().out
        assert "> What is the last runner of the team called" in out
        assert " 0 1 2 3 4 5 6" in out
        assert "no timeline: the traces do not know this request" in out
        table = out[out.index("TTFT mean") :]
        assert table.count("0 of 3") == 3
        assert "timeline.png" not in table
        assert written(tmp_path) == FILES
    report = Report.decode((tmp_path / "out" / "report.json").read_bytes())
    assert [mode.name for mode in report.modes] == ["aggregated", "kvbaton-pull", "kvbaton-push"]
    assert report.environment.command.startswith("kvbaton demo --model")
    assert (tmp_path / "out" / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert "kvbaton push" in (tmp_path / "out" / "summary.md").read_text()
    assert left() == set()


def test_failed_requests_are_shown_and_make_it_fail(
    tmp_path: Path,
    words: list[str],
    left: Left,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAKE_BEHAVIOUR", '{"BatonConnector": "cut"}')
    assert cli.main(words) == 1
    assert "kvbaton push: 1 of 8 tokens came" in capsys.readouterr().out
    assert written(tmp_path) == FILES
    assert left() == set()


@pytest.mark.parametrize(("behaviour", "said"), [("die", "does not fit"), ("crash", "the fake engine crashed")])
def test_an_engine_that_dies_is_explained_and_nothing_is_left(
    tmp_path: Path,
    words: list[str],
    left: Left,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    behaviour: str,
    said: str,
) -> None:
    monkeypatch.setenv("FAKE_BEHAVIOUR", json.dumps({"BatonConnector": behaviour}))
    assert cli.main(words) == 1
    assert said in capsys.readouterr().err
    assert written(tmp_path) == set()
    assert left() == set()


def test_ctrl_c_leaves_nothing_and_keeps_earlier_files(tmp_path: Path, words: list[str], left: Left) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "report.json").write_text("of before")
    program = (
        "import sys; from kvbaton import cli; from kvbaton.bench import demo; from kvbaton.bench.modes import Setup; "
        f"fake = tuple({list(FAKE)!r}); "
        "demo._setup = lambda model, root: Setup(model=model, state_root=root, cores=(0, 0), engine_command=fake, "
        "machine=demo.surroundings.bench_machine(), router_command=fake); sys.exit(cli.main(sys.argv[1:]))"
    )
    environment = os.environ | {"FAKE_BEHAVIOUR": '{"BatonConnector": "hang"}'}
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "kvbaton push" in line and "answered" in line:
            break
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, rest
    assert "stopped; nothing was written" in rest
    assert (tmp_path / "out" / "report.json").read_text() == "of before"
    assert left() == set()


def test_a_missing_extra_is_named_before_anything_starts(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(words) == 1
    assert "pip install 'kvbaton[bench]'" in capsys.readouterr().err


def test_help_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(shlex.split("demo --help"))
    assert "kvbaton demo --model tiny --quick" in capsys.readouterr().out


def test_the_setup_is_of_this_machine(tmp_path: Path) -> None:
    setup = demo._setup("tiny", tmp_path)
    assert set(setup.cores) == os.sched_getaffinity(0)
    assert msgspec.structs.asdict(setup)["trace"] is True

"""`kvbaton bench compare` with engines, router and load generator that are fake, and processes that are real."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvbaton import cli
from kvbaton.bench import compare, hand_edit
from kvbaton.bench.records import ModeReport, Report
from kvbaton.errors import UsageError
from kvbaton.launch.identity import Identity

FAKE = shlex.join([sys.executable, str(Path(__file__).with_name("fake_bench_engine.py"))])
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
        return found

    yield find
    for pid in find():
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "fake-model"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 500}')
    return folder


def arguments(tmp_path: Path, model: Path, modes: str, *more: str) -> list[str]:
    return [
        *("bench", "compare", "--model", str(model), "--modes", modes),
        *("--num-prompts", "4", "--rate", "50", "--input-len", "20", "--output-len", "3", "--cores", "0,0"),
        *("--out", str(tmp_path / "out"), "--state-dir", str(tmp_path / "state"), "--deadline", "20"),
        *("--engine-command", FAKE, "--router-command", FAKE, "--bench-command", FAKE, *more),
    ]


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has; the same core twice is refused on a command line."""
    monkeypatch.setattr(compare, "parse_cores", lambda text: (0, 0))


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = cli.main(words)
    return code, capsys.readouterr().out


def report_in(tmp_path: Path) -> dict[str, ModeReport]:
    report = Report.decode((tmp_path / "out" / "report.json").read_bytes())
    return {mode.name: mode for mode in report.modes}


def test_modes_take_turns_and_each_run_has_its_files(
    tmp_path: Path, model: Path, left: Left, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = run(arguments(tmp_path, model, "aggregated,kvbaton-pull", "--iterations", "2"), capsys)
    assert code == 0
    steps = [line for line in out.splitlines() if line.startswith("[")]
    assert steps == [
        "[1/4] one engine, all cores",
        "[2/4] kvbaton pull",
        "[3/4] one engine, all cores",
        "[4/4] kvbaton pull",
    ]
    found = report_in(tmp_path)
    seeds = [run.seed for mode in found.values() for run in mode.runs]
    assert len(set(seeds)) == 4
    for mode in found.values():
        for number, each in enumerate(mode.runs):
            assert each.figures is not None
            assert (each.figures.completed, each.figures.failed) == (4, 0)
            assert each.results_file == f"results/{mode.name}_qps50_in20_out3_iter{number}.json"
            written = json.loads((tmp_path / "out" / each.results_file).read_text())
            assert written["seed"] == each.seed
        assert any("--no-enable-prefix-caching" in command for command in mode.commands)
    assert (tmp_path / "out" / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert "TTFT mean, ms" in (tmp_path / "out" / "summary.md").read_text()
    assert left() == [os.getpid()] or left() == []


def test_what_fails_is_a_row_and_the_next_is_tried(
    tmp_path: Path, model: Path, left: Left, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_edit, "check_nixl_package", lambda: None)
    behaviour = {"NixlConnector": "die", "NixlPushConnector": "hang", "BatonConnector": "crash", "none": "cut"}
    monkeypatch.setenv("FAKE_BEHAVIOUR", json.dumps(behaviour))
    modes = "nixl-pull,nixl-push,kvbaton-push,aggregated"
    code, out = run(arguments(tmp_path, model, modes, "--deadline", "3"), capsys)
    assert code == 1
    found = report_in(tmp_path)
    assert list(found) == modes.split(",")
    died, hung, crashed, cut = (mode.runs[0] for mode in found.values())
    assert "before it was ready" in (died.failure or "")
    assert "the fake model does not fit" in (died.failure or "")
    assert "not finished after 3 s" in (hung.failure or "")
    assert "was ended by SIGKILL while serving" in (crashed.failure or "")
    assert "the fake engine crashed" in (crashed.failure or "")
    assert died.figures is hung.figures is crashed.figures is None
    assert cut.figures is not None
    assert (cut.figures.completed, cut.figures.failed) == (0, 4)
    assert cut.failure == "1 of 3 tokens came"
    assert "vLLM NixlConnector, as shipped: " in out
    assert "the run" in out
    assert "4 of 4" in out
    assert set(left()) <= {os.getpid()}


def test_an_edit_that_did_not_take_is_no_edited_row(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_edit, "check_nixl_package", lambda: None)
    code, out = run(arguments(tmp_path, model, "nixl-pull-edited"), capsys)
    assert code == 1
    assert "the hand edit did not take" in out
    assert report_in(tmp_path)["nixl-pull-edited"].is_hand_edited


def test_without_the_package_of_that_name_the_row_says_what_to_install(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _ = run(arguments(tmp_path, model, "nixl-pull"), capsys)
    assert code == 1
    assert "pip install --no-deps nixl" in (report_in(tmp_path)["nixl-pull"].runs[0].failure or "")


def test_a_load_generator_that_fails_shows_the_end_of_its_log(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = shlex.join([sys.executable, "-c", "raise ValueError('no such dataset')"])
    words = arguments(tmp_path, model, "aggregated")
    words[words.index("--bench-command") + 1] = broken
    code, _ = run(words, capsys)
    assert code == 1
    failure = report_in(tmp_path)["aggregated"].runs[0].failure or ""
    assert "`vllm bench serve` ended with exit code 1" in failure
    assert "ValueError: no such dataset" in failure


def test_a_result_that_is_none_is_not_read(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "out" / "results"
    script = f"import pathlib; pathlib.Path({str(results)!r}, 'aggregated_qps50_in20_out3_iter0.json').write_text('[]')"
    words = arguments(tmp_path, model, "aggregated")
    words[words.index("--bench-command") + 1] = shlex.join([sys.executable, "-c", script])
    code, _ = run(words, capsys)
    assert code == 1
    assert "not a detailed result" in (report_in(tmp_path)["aggregated"].runs[0].failure or "")


def test_ctrl_c_keeps_what_was_measured_and_leaves_nothing(tmp_path: Path, model: Path, left: Left) -> None:
    # The same core twice is possible only from within, so a program of two lines stands for the command.
    program = (
        "import sys; from kvbaton import cli; from kvbaton.bench import compare; "
        "compare.parse_cores = lambda text: (0, 0); sys.exit(cli.main(sys.argv[1:]))"
    )
    environment = os.environ | {"FAKE_BEHAVIOUR": '{"BatonConnector": "hang"}'}
    words = arguments(tmp_path, model, "aggregated,kvbaton-push,kvbaton-pull", "--deadline", "100")
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    give_up_at_s = time.monotonic() + PATIENCE_S
    for line in process.stdout:
        assert time.monotonic() < give_up_at_s
        if "the load generator starts" in line and "kvbaton push" in line:
            break
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert list(report_in(tmp_path)) == ["aggregated"]
    assert "written to" in rest
    assert set(left()) <= {os.getpid()}


class TestMistakes:
    def flags(self, **fields: object) -> Namespace:
        values: dict[str, object] = {
            "modes": "aggregated",
            "num_prompts": 20,
            "rate": 1.0,
            "input_len": 10,
            "output_len": 10,
            "iterations": 1,
            "deadline": 240.0,
            "seed": 1,
            "out": "results",
            "bench_command": None,
        }
        return Namespace(**(values | fields))

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"rate": 0.0}, "--rate: 0.0 is not positive"),
            ({"num_prompts": 0}, "--num-prompts: 0"),
            ({"iterations": -1}, "--iterations: -1"),
            ({"rate": 0.05}, "arrive in 400 s, and the deadline is 240 s"),
            ({"modes": "aggregated,other"}, "'other' is unknown"),
            ({"modes": "aggregated,aggregated"}, "given twice"),
        ],
    )
    def test_are_seen_at_once(self, fields: dict[str, object], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            compare.settings_from(self.flags(**fields))

    def test_a_pair_needs_two_cores(self, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compare, "parse_cores", lambda text: (0,))
        words = arguments(tmp_path, model, "aggregated")
        assert cli.main(words) == 2

    def test_an_unknown_action_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            cli.main(["bench", "sweep"])
        assert io.StringIO(capsys.readouterr().err).read()

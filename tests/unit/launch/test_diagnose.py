"""Which line of a log is shown, which remedy is given, and how far a start is said to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbaton.launch.diagnose import diagnose, telling_line
from kvbaton.launch.ready import last_lines, stage
from kvbaton.launch.smoke import moved

TRACEBACK = """\
(EngineCore pid=2) ERROR EngineCore failed to start.
(EngineCore pid=2) Traceback (most recent call last):
(EngineCore pid=2)   File "kv_cache_utils.py", line 1, in check
(EngineCore pid=2) ValueError: To serve at least one request 2.0 GiB KV cache is needed, which is larger than the available
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
nanobind: leaked 2 instances!
"""


def test_the_root_cause_is_shown_not_its_echo(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(TRACEBACK)
    found = diagnose(str(log), 1)
    assert found.line is not None
    assert "ValueError: To serve at least one request" in found.line
    assert found.remedy == "Raise --kv-cache-gib or lower --max-model-len."
    assert found.how == "ended with exit code 1"
    assert len(found.tail) == 7


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("OSError: [Errno 98] Address already in use", "another port"),
        ("RuntimeError: operator torchvision::nms does not exist", "uninstall torchvision"),
        ("PackageNotFoundError: No package metadata was found for vllm", "kvbaton doctor"),
        ("ModuleNotFoundError: No module named 'nixl_cu12'", "kvbaton[nixl]"),
        ("vllm: error: unrecognized arguments: --nonsense", "--engine-args"),
        ("something else entirely", "Read the whole log"),
    ],
)
def test_known_causes_have_a_remedy(tmp_path: Path, line: str, remedy: str) -> None:
    log = tmp_path / "log"
    log.write_text(f"INFO fine\n{line}\n")
    assert remedy in diagnose(str(log), 1).remedy


@pytest.mark.parametrize(
    ("code", "how"),
    [(0, "exit code 0"), (128, "exit code 128"), (137, "SIGKILL"), (139, "SIGSEGV"), (255, "exit code 255")],
)
def test_the_way_it_ended_is_named(tmp_path: Path, code: int, how: str) -> None:
    assert how in diagnose(str(tmp_path / "none"), code).how


def test_a_kill_without_a_word_is_probably_memory(tmp_path: Path) -> None:
    assert "memory" in diagnose(str(tmp_path / "none"), 137).remedy


def test_without_an_exception_the_last_complaint_is_shown() -> None:
    assert telling_line(["fine", "cannot open the door", "fine"]) == "cannot open the door"
    assert telling_line(["fine"]) is None
    assert telling_line(["WARNING a limit may cause OSError: too many files"]) is None


def test_routes_do_not_fill_the_end_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("ValueError: the reason\n" + "INFO Route: /health, Methods: GET\n" * 50)
    assert diagnose(str(log), 1).tail == ("ValueError: the reason",)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", "importing"),
        ("INFO non-default args: {}", "starting its engine core"),
        ("INFO Starting to load model /m...", "loading weights"),
        ("INFO CPU KV cache size: 131,072 tokens", "warming up"),
        ("INFO Starting vLLM server on http://127.0.0.1:1", "opening its port"),
    ],
)
def test_a_start_is_followed_by_its_log(tmp_path: Path, line: str, expected: str) -> None:
    log = tmp_path / "log"
    log.write_text(f"INFO earlier\n{line}\nINFO later\n")
    assert stage(str(log)) == expected


def test_last_lines_of_a_long_log_and_of_none(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"{number}\n" for number in range(100_000)))
    assert last_lines(str(log), 3) == ["99997", "99998", "99999"]
    assert last_lines(str(tmp_path / "none"), 3) == []


def test_traces_are_summed_and_forgiven(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text(
        '{"event": "segment_moved", "num_bytes": 5, "move_s": 0.5}\n{"event": "closed"}\nnoise\n'
        '{"event": "segment_moved", "num_bytes": 7, "move_s": 0.25}\n{"event": "segm'
    )
    total = moved([trace, tmp_path / "none"])
    assert total is not None
    assert (total.num_bytes, total.move_s, total.segments) == (12, 0.75, 2)
    assert moved([tmp_path / "none"]) is None

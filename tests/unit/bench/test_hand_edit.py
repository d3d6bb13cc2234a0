"""The hand edit, on bindings that stand for NIXL's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvbaton.bench.hand_edit import check_hand_edit, write_hand_edit
from kvbaton.errors import DeploymentError
from kvbaton.launch.plan import ProcessPlan
from kvbaton.launch.supervisor import Instance

BINDINGS = """
class nixlAgentConfig:
    def __init__(self):
        self.delay = 0
    pthrDelay = property(lambda self: self.delay, lambda self, delay: setattr(self, "delay", delay))
"""
AGENT = """
from nixl_cu12 import _bindings as nixlBind
config = nixlBind.nixlAgentConfig()
config.pthrDelay = 0
print(config.pthrDelay, type(config).__mro__[1].__name__)
"""


def in_a_process(path: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", AGENT],
        env={"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    package = tmp_path / "packages" / "nixl_cu12"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "_bindings.py").write_text(BINDINGS)
    return package.parent


def test_the_delay_is_ours_whatever_is_set(tmp_path: Path, packages: Path) -> None:
    env = write_hand_edit(tmp_path / "edit")
    done = in_a_process(f"{env['PYTHONPATH']}:{packages}")
    assert done.stdout.split() == ["1000", "nixlAgentConfig"]
    assert "kvbaton: NIXL hand-edited: nixl_cu12._bindings, pthrDelay = 1000 us" in done.stderr


def test_without_the_folder_nothing_is_edited(tmp_path: Path, packages: Path) -> None:
    write_hand_edit(tmp_path / "edit")
    done = in_a_process(str(packages))
    assert done.stdout.split()[0] == "0"
    assert done.stderr == ""


def test_what_was_on_the_path_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    assert write_hand_edit(tmp_path)["PYTHONPATH"] == f"{tmp_path}:/somewhere"
    monkeypatch.delenv("PYTHONPATH")
    assert write_hand_edit(tmp_path)["PYTHONPATH"] == str(tmp_path)


def test_an_engine_must_say_that_it_was_edited(tmp_path: Path) -> None:
    log = tmp_path / "decode-0.log"
    plan = ProcessPlan(name="decode-0", role="decode", host="x", port=1, argv=(), env={}, log_path=str(log))
    log.write_text("INFO starting\nkvbaton: NIXL hand-edited: nixl_cu12._bindings, pthrDelay = 1000 us\n")
    check_hand_edit([Instance(plan)])
    log.write_text("INFO starting\n")
    with pytest.raises(DeploymentError, match="decode-0 runs with NIXL as shipped"):
        check_hand_edit([Instance(plan)])

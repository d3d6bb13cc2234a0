"""The file other programs read to find a running deployment: `<run dir>/state.json`.

Invariant: the file is replaced in one step, never seen half-written, and while a launcher lives it holds the lock
beside it; a state file whose lock is free is left over from a launcher that was killed. Read `supervisor` for who
writes it and `operate` for who reads it.
"""

from __future__ import annotations

import enum
import fcntl
import os
import signal
from pathlib import Path

import msgspec

from kvbaton.cluster_key import make_key_file
from kvbaton.launch.identity import Identity, session_members, wait_gone
from kvbaton.launch.remedy import deployment_error, usage_error

_STATE = "state.json"
_LOCK = "lock"
_KEY = "cluster.key"


class Phase(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """One running process. `pid` is the engine or router itself, `leash` the process that watches it."""

    name: str
    role: str
    url: str
    pid: int
    process: Identity | None
    leash: Identity | None
    log_path: str
    trace_path: str | None
    cores: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()


class DeploymentState(msgspec.Struct, frozen=True, kw_only=True):
    """What runs, and where."""

    version: int = 1
    name: str
    phase: Phase
    model: str
    model_path: str
    connector: str
    direction: str
    router_url: str
    launcher: Identity
    created_unix_s: float
    run_dir: str
    router: ProcessState | None
    instances: tuple[ProcessState, ...]

    def processes(self) -> list[ProcessState]:
        """In the order they are stopped: router, decode, prefill."""
        routers = [self.router] if self.router else []
        return routers + sorted(self.instances, key=lambda each: each.role == "prefill")


class RunDir:
    """The folder of one deployment."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock_fd = -1

    @property
    def key_path(self) -> Path:
        """Of the cluster key that the deployment's engines share, where it has one of its own."""
        return (self.path / _KEY).absolute()

    def make_key(self) -> None:
        """The engines' key is new, and gone when the deployment is forgotten. Only the launcher asks for it."""
        self.key_path.unlink(missing_ok=True)
        make_key_file(self.key_path)

    def check_free(self, name: str) -> None:
        """DeploymentError when a launcher is at work here; asked before anything slow happens."""
        state = self.read()
        if state and state.launcher.alive():
            raise self._already_running(name)

    def lock(self, name: str) -> None:
        """From now until `release` this process is the deployment's launcher. DeploymentError when another is."""
        self.path.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise self._already_running(name) from None
        self._lock_fd = fd
        stale = self.read()
        if stale is not None:
            end_processes(stale, timeout_s=5.0)
            self.forget()

    def release(self) -> None:
        """Nothing is recorded any more and another launcher may come; logs and traces stay."""
        if self._lock_fd >= 0:
            self.forget()
            os.close(self._lock_fd)
            self._lock_fd = -1

    def read(self) -> DeploymentState | None:
        """The recorded deployment, alive or not."""
        try:
            return msgspec.json.decode((self.path / _STATE).read_bytes(), type=DeploymentState)
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, OSError) as error:
            raise usage_error(
                f"{self.path / _STATE}: not a state file of this version ({error})",
                "Remove it once nothing of it runs.",
            ) from None

    def write(self, state: DeploymentState) -> None:
        draft = self.path / f"{_STATE}.new"
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")
        draft.replace(self.path / _STATE)

    def forget(self) -> None:
        """No deployment is recorded, and its key opens nothing any more."""
        self.key_path.unlink(missing_ok=True)
        (self.path / _STATE).unlink(missing_ok=True)

    def _already_running(self, name: str) -> Exception:
        state = self.read()
        where = f" at {state.router_url} (pid {state.launcher.pid})" if state else ""
        return deployment_error(
            f"deployment {name!r} is already running{where}",
            f"Stop it with `kvbaton down --name {name}`, or start a second one with --name.",
        )


def this_process() -> Identity:
    """The running launcher, as its state file names it."""
    identity = Identity.of(os.getpid())
    assert identity is not None, "a running process has an entry in /proc"
    return identity


def end_processes(state: DeploymentState, timeout_s: float) -> None:
    """Nothing recorded in `state` is alive. Only processes whose start time matches are touched."""
    for process in state.processes():
        members = [each for each in (process.process, process.leash) if each is not None]
        for each in members[:1]:
            each.send(signal.SIGTERM)
        orphans = session_members(process.leash) if process.leash else []
        for left in [*wait_gone(members, timeout_s), *orphans]:
            left.send(signal.SIGKILL)
        wait_gone([*members, *orphans], timeout_s)

"""`kvbaton down`, `status` and `logs`: everything that works on a deployment another process started.

Invariant: only processes recorded in a state file are touched, and only while their start time still matches.
Read `state` next.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import msgspec

from kvbaton.launch.identity import wait_gone
from kvbaton.launch.ready import last_lines, serves
from kvbaton.launch.remedy import usage_error
from kvbaton.launch.state import DeploymentState, ProcessState, RunDir, end_processes

_POLITE_S = 60.0
_LEASH_S = 10.0
_FOLLOW_TICK_S = 0.2


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One process as it is now."""

    name: str
    role: str
    url: str
    pid: int
    alive: bool
    serving: bool
    cores: tuple[int, ...]
    gpus: tuple[str, ...]
    log_path: str
    trace_path: str | None


class DeploymentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment as it is now; `phase` is `stale` when its launcher is gone."""

    name: str
    phase: str
    model: str
    connector: str
    direction: str
    router_url: str
    uptime_s: float
    processes: tuple[ProcessStatus, ...]


def deployments(state_root: Path) -> list[RunDir]:
    """The folders under `state_root` that record one."""
    return [RunDir(path.parent) for path in sorted(state_root.glob("*/state.json"))]


def down(state_root: Path, name: str | None, out: TextIO) -> int:
    """Nothing of deployment `name` runs any more; of none at all, where `name` is None."""
    run_dirs = deployments(state_root) if name is None else [RunDir(state_root / name)]
    stopped = 0
    for run_dir in run_dirs:
        state = run_dir.read()
        if state is not None:
            out.write(f"stopping {state.name}\n")
            out.flush()
            _stop(run_dir, state)
            stopped += 1
    if not stopped:
        out.write("nothing is running\n" if name is None else f"no deployment named {name!r} is running\n")
    return 0


def status(state_root: Path, out: TextIO, *, as_json: bool) -> int:
    """What is recorded, and whether it is alive. The exit code is 0 also when nothing is."""
    found = [_status(state) for run_dir in deployments(state_root) if (state := run_dir.read())]
    if as_json:
        out.write(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
        return 0
    if not found:
        out.write("nothing is running\n")
    for each in found:
        out.write(f"{each.name}  {each.phase}  {each.model}  {each.connector}  {each.router_url}\n")
        for process in each.processes:
            health = "serving" if process.serving else "not answering" if process.alive else "gone"
            cores = f"  cores {','.join(map(str, process.cores))}" if process.cores else ""
            out.write(f"  {process.name:<10} {health:<14} pid {process.pid:<8} {process.url}{cores}\n")
    return 0


def logs(state_root: Path, name: str, role: str | None, out: TextIO, *, count: int, follow: bool) -> int:
    """The last `count` lines of every log of `name`, or of those of `role` (`decode`, `prefill-0`, ...)."""
    paths = _log_paths(state_root / name, name, role)
    for path in paths:
        out.writelines(f"{path.stem}: {line}\n" for line in last_lines(str(path), count))
    out.flush()
    if follow:
        for line in _follow(paths):
            out.write(line)
            out.flush()
    return 0


def _stop(run_dir: RunDir, state: DeploymentState) -> None:
    if state.launcher.send(signal.SIGTERM):
        wait_gone([state.launcher], _POLITE_S)
        state.launcher.send(signal.SIGKILL)
    # Without a launcher the leashes end their commands; this is for what is left even then.
    leashes = [each.leash for each in state.processes() if each.leash]
    wait_gone(leashes, _LEASH_S)
    end_processes(state, timeout_s=5.0)
    run_dir.forget()


def _status(state: DeploymentState) -> DeploymentStatus:
    return DeploymentStatus(
        name=state.name,
        phase=state.phase.value if state.launcher.alive() else "stale",
        model=state.model,
        connector=state.connector,
        direction=state.direction,
        router_url=state.router_url,
        uptime_s=round(time.time() - state.created_unix_s, 1),
        processes=tuple(_process_status(each) for each in state.processes()),
    )


def _process_status(process: ProcessState) -> ProcessStatus:
    alive = process.process is not None and process.process.alive()
    host, _, port = process.url.removeprefix("http://").rpartition(":")
    return ProcessStatus(
        name=process.name,
        role=process.role,
        url=process.url,
        pid=process.pid,
        alive=alive,
        serving=alive and serves(host.strip("[]"), int(port)),
        cores=process.cores,
        gpus=process.gpus,
        log_path=process.log_path,
        trace_path=process.trace_path,
    )


def _log_paths(folder: Path, name: str, role: str | None) -> list[Path]:
    """Running or not: the logs of a deployment that failed are the ones somebody wants to read."""
    state = RunDir(folder).read()
    recorded = [Path(each.log_path) for each in state.processes()] if state else []
    paths = recorded or sorted((folder / "logs").glob("*.log"))
    wanted = [path for path in paths if role is None or path.stem == role or path.stem.rpartition("-")[0] == role]
    if not paths:
        raise usage_error(f"no logs of a deployment named {name!r}", "`kvbaton status` lists what is running.")
    if not wanted:
        raise usage_error(f"no log of {role!r}", f"There are: {', '.join(path.stem for path in paths)}.")
    return wanted


def _follow(paths: list[Path]) -> Iterator[str]:
    """New lines of all `paths` as they appear, for ever."""
    ends = {path: path.stat().st_size for path in paths if path.exists()}
    while True:
        time.sleep(_FOLLOW_TICK_S)
        for path in paths:
            if not path.exists():
                continue
            size = path.stat().st_size
            start = ends.get(path, 0)
            start = 0 if size < start else start  # it was started anew
            with path.open("rb") as log:
                log.seek(start)
                new = log.read()
            # A half-written line waits for its end.
            complete = new[: new.rfind(b"\n") + 1]
            ends[path] = start + len(complete)
            for line in complete.decode(errors="replace").splitlines():
                yield f"{path.stem}: {line}\n"

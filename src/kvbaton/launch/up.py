"""`kvbaton up`: plan, start, first request, then watch until Ctrl-C, `down` or a death.

Invariant: a signal only sets a counter that every wait looks at; so no child is ever started and then lost to an
exception in between. Read `supervisor` next.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self, TextIO

import msgspec

from kvbaton.launch.arguments import spec_from
from kvbaton.launch.machine import Machine, this_machine
from kvbaton.launch.models import RECIPES, default_models_dir, resolve_model
from kvbaton.launch.plan import DeploymentPlan, build_plan
from kvbaton.launch.progress import Progress, progress_for
from kvbaton.launch.smoke import first_request
from kvbaton.launch.spec import DeploymentSpec
from kvbaton.launch.state import Phase, RunDir
from kvbaton.launch.supervisor import Deployment, Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruptions:
    """Counts requests to stop while it is entered, in place of what the signals did before."""

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup, or in a script's background
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.count += 1


def main(flags: argparse.Namespace, arguments: list[str], out: TextIO) -> int:
    """`kvbaton up` with these flags, which were parsed from `arguments`; the exit code."""
    machine = this_machine()
    if flags.dry_run:
        return dry_run(spec_from(flags, _model_without_preparing(flags.model, out)), machine, out)
    # Every mistake that can be seen is, before a model is prepared: that may take a minute.
    spec = spec_from(flags, flags.model)
    RunDir(spec.state_dir).check_free(spec.name)
    build_plan(spec, machine)
    if flags.detach:
        return up_detached(spec, [each for each in arguments if each != "--detach"], out)
    spec = msgspec.structs.replace(spec, model=resolve_model(flags.model))
    return up(spec, machine, out, smoke=not flags.no_smoke)


def dry_run(spec: DeploymentSpec, machine: Machine, out: TextIO) -> int:
    """Every command as a shell line; starts nothing."""
    plan = build_plan(spec, machine)
    out.writelines(f"# warning: {warning}\n" for warning in plan.warnings)
    if spec.makes_own_key:
        path = RunDir(spec.state_dir).key_path
        out.write(f"# `up` makes the engines' key by itself; elsewhere: kvbaton key new {shlex.quote(str(path))}\n")
    out.writelines(f"# {process.name}\n{process.shell()}\n" for process in (*plan.engines, plan.router))
    return 0


def up(spec: DeploymentSpec, machine: Machine, out: TextIO, *, smoke: bool = True) -> int:
    """The exit code once the deployment has been taken down again: 0 when that was asked for."""
    with Interruptions() as interruptions:
        progress = progress_for(out)
        plan = build_plan(spec, machine)
        _announce(plan, progress)

        def warm_up(deployment: Deployment) -> None:
            if smoke:
                progress.note(first_request(deployment))
            progress.note(_how_to_use(deployment))

        try:
            with Deployment(
                spec, plan=plan, progress=progress, interruptions=lambda: interruptions.count, warm_up=warm_up
            ) as deployment:
                deployment.run()
                progress.note("stopping (once more to be quick)")
        except Interrupted:
            progress.note("stopped before it was ready")
            return 0
        progress.note("stopped")
    return 0


def up_detached(spec: DeploymentSpec, arguments: list[str], out: TextIO) -> int:
    """0 once the deployment serves in the background; the launcher's own exit code if it ended before."""
    run_dir = RunDir(spec.state_dir)
    run_dir.path.mkdir(parents=True, exist_ok=True)
    log_path = run_dir.path / "launcher.log"
    with log_path.open("wb") as log:
        launcher = subprocess.Popen(  # noqa: S603 - ourselves, with the arguments we were given
            [sys.executable, "-m", "kvbaton", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    with Interruptions() as interruptions:
        code = _follow(launcher, run_dir, log_path, out, interruptions)
    if code is None:
        out.write(f"running in the background (pid {launcher.pid}); stop it with `kvbaton down --name {spec.name}`\n")
        launcher.returncode = 0  # it outlives us on purpose: no complaint about a child that was not waited for
        return 0
    return code


def _model_without_preparing(model: str, out: TextIO) -> str:
    """Where a model of ours is, or would be; anything else as it was given."""
    if model not in RECIPES:
        return model
    folder = default_models_dir() / model
    if not folder.is_dir():
        out.write(f"# before: kvbaton models prepare {model}\n")
    return str(folder)


def _follow(
    launcher: subprocess.Popen[bytes], run_dir: RunDir, log_path: Path, out: TextIO, interruptions: Interruptions
) -> int | None:
    """Pass the launcher's lines on until it serves (None) or ends (its exit code)."""
    with log_path.open("rb") as log:
        while True:
            code = launcher.poll()
            state = run_dir.read()
            serving = bool(state and state.phase is Phase.READY and state.launcher.pid == launcher.pid)
            out.write(log.read().decode(errors="replace"))
            out.flush()
            if code is not None:
                return code
            if serving:
                return None
            if interruptions.count:
                os.kill(launcher.pid, signal.SIGTERM)
                interruptions.count = 0
            time.sleep(0.2)


def _announce(plan: DeploymentPlan, progress: Progress) -> None:
    spec = plan.spec
    engines = (
        f"{spec.num_decode} engines that do both"
        if not spec.prefill_count
        else f"{spec.prefill_count} prefill and {spec.num_decode} decode"
    )
    how = spec.connector.value + (f", {spec.effective_direction.value}" if spec.prefill_count else "")
    progress.note(f"{plan.model_name}: {engines}, connector {how}, on {plan.device.value}")
    for warning in plan.warnings:
        progress.note(f"warning: {warning}")
    progress.note(f"logs: {Path(plan.router.log_path).parent}")


def _how_to_use(deployment: Deployment) -> str:
    body = {"model": deployment.model_name, "prompt": "The capital of France is", "max_tokens": 16}
    data = shlex.quote(msgspec.json.encode(body).decode())
    url = deployment.router_url
    return (
        f"router: {url}\n"
        f"  curl {url}/v1/completions -H 'Content-Type: application/json' -d {data}\n"
        f"Stop everything with Ctrl-C, or `kvbaton down --name {deployment.spec.name}`."
    )

"""Starts a deployment, watches it, and takes it down in order.

    with Deployment(spec) as deployment:
        httpx.post(f"{deployment.router_url}/v1/completions", ...)

Invariant: whatever happens after the first child was started, `close` runs and leaves no process behind: router first,
so that no new work arrives, then decode engines, then prefill engines, whose blocks decode may have been reading.
One thread; every wait looks after all children. Read `process` for one child, `plan` for what is started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import kvbaton.launch.ready as readiness
from kvbaton.errors import DeploymentError
from kvbaton.launch.diagnose import diagnose
from kvbaton.launch.identity import descendants
from kvbaton.launch.machine import Machine, this_machine
from kvbaton.launch.plan import DeploymentPlan, ProcessPlan, build_plan
from kvbaton.launch.process import Child
from kvbaton.launch.progress import Progress, Row, Silent
from kvbaton.launch.remedy import deployment_error, usage_error
from kvbaton.launch.spec import DeploymentSpec
from kvbaton.launch.state import DeploymentState, Phase, ProcessState, RunDir, this_process

_TICK_S = 0.1


class Interrupted(Exception):
    """Stop was asked for while a deployment was starting."""


class Instance:
    """One engine or the router: its place in the plan, and its process while it has one."""

    def __init__(self, plan: ProcessPlan) -> None:
        self.plan = plan
        self.child: Child | None = None
        self.ready_after_s: float | None = None

    @property
    def ready(self) -> bool:
        return self.ready_after_s is not None

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def role(self) -> str:
        return self.plan.role

    @property
    def url(self) -> str:
        return self.plan.url

    @property
    def log_path(self) -> Path:
        return Path(self.plan.log_path)

    @property
    def trace_path(self) -> Path | None:
        return Path(self.plan.trace_path) if self.plan.trace_path else None

    @property
    def pid(self) -> int:
        """The engine's first process, which serves HTTP. DeploymentError when it has not been started."""
        if self.child is None:
            raise deployment_error(f"{self.name} is not running", "Start it first.")
        return self.child.pid

    @property
    def pids(self) -> list[int]:
        """That process and all below it: vLLM's engine core and workers are processes of their own."""
        return [self.pid, *(each.pid for each in descendants(self.pid))]

    @property
    def exit_code(self) -> int | None:
        """None while it runs or before it was started."""
        return self.child.exit_code() if self.child else None

    def state(self) -> ProcessState | None:
        if self.child is None:
            return None
        return ProcessState(
            name=self.name,
            role=self.role,
            url=self.url,
            pid=self.child.pid,
            process=self.child.identity,
            leash=self.child.leash,
            log_path=self.plan.log_path,
            trace_path=self.plan.trace_path,
            cores=self.plan.cores,
            gpus=self.plan.gpus,
        )


class Deployment:
    """Engines and router of one spec, from `open` to `close`."""

    def __init__(
        self,
        spec: DeploymentSpec,
        *,
        machine: Machine | None = None,
        plan: DeploymentPlan | None = None,
        progress: Progress | None = None,
        interruptions: Callable[[], int] = lambda: 0,
        warm_up: Callable[[Deployment], None] | None = None,
    ) -> None:
        """Nothing is started yet.

        `interruptions` counts requests to stop: one is polite, two are in a hurry. `warm_up` is called once everybody
        serves; the deployment counts as ready when it has returned.
        """
        self.spec = spec
        self.plan = plan or build_plan(spec, machine or this_machine())
        self.instances = [Instance(each) for each in self.plan.engines]
        self.router = Instance(self.plan.router)
        self._progress = progress or Silent()
        self._interruptions = interruptions
        self._warm_up = warm_up
        self._run_dir = RunDir(spec.state_dir)
        self._created_unix_s = time.time()

    @property
    def router_url(self) -> str:
        return self.router.url

    @property
    def model_name(self) -> str:
        """What to put into a request's `model`."""
        return self.plan.model_name

    def by_role(self, role: str) -> list[Instance]:
        """`prefill`, `decode` or `both`."""
        return [instance for instance in self.instances if instance.role == role]

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> None:
        """Every engine and the router serve. DeploymentError when one dies or is too slow; then nothing is left."""
        if self.plan.gpus_missing:
            raise usage_error(
                f"no {self.plan.device.value} GPU was found on this machine",
                "Use --device cpu, or --dry-run for commands to run elsewhere.",
            )
        self._run_dir.lock(self.spec.name)
        try:
            if self.spec.makes_own_key:
                self._run_dir.make_key()
            self._forget_old_traces()
            self._launch(self.instances)
            self._launch([self.router])
            if self._warm_up:
                self._warm_up(self)
            self._write_state(Phase.READY)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Nothing of the deployment is left. May be called again."""
        if any(each.child for each in self._everybody()):
            self._write_state(Phase.STOPPING)
        for group in ([self.router], self.by_role("decode") + self.by_role("both"), self.by_role("prefill")):
            self._stop(group)
        self._run_dir.release()

    def kill(self, instance: Instance) -> None:
        """It is gone at once, as in a crash; the others are left alone."""
        if instance.child is not None:
            instance.child.kill()
        instance.ready_after_s = None

    def start(self, instance: Instance) -> None:
        """It serves again, on the same port, with its log continued."""
        if instance.child is not None:
            instance.child.kill()
        self._launch([instance], append_log=True)
        self._write_state(Phase.READY)

    def check(self) -> None:
        """DeploymentError if an engine or the router has ended, saying why."""
        self._check(self._everybody())

    def run(self) -> None:
        """Until somebody asks for the end. DeploymentError when a child ends first."""
        while not self._interruptions():
            self.check()
            time.sleep(_TICK_S)

    def attend(self, finished: Callable[[], bool]) -> None:
        """Returns when `finished` is true; raises as soon as a child ends or a stop is asked for."""
        while not finished():
            if self._interruptions():
                raise Interrupted
            self.check()
            time.sleep(_TICK_S)

    def _everybody(self) -> list[Instance]:
        return [*self.instances, self.router]

    def _launch(self, group: Sequence[Instance], *, append_log: bool = False) -> None:
        """All of `group` are started at once and serve."""
        for instance in group:
            instance.ready_after_s = None
            instance.child = Child(instance.plan, append_log=append_log)
        self._write_state(Phase.STARTING)
        give_up_at_s = time.monotonic() + self.spec.startup_timeout_s
        try:
            while not all(instance.ready for instance in group):
                if self._interruptions():
                    raise Interrupted
                if time.monotonic() > give_up_at_s:
                    raise self._too_slow(group)
                self._look_at(group)
                time.sleep(_TICK_S)
        finally:
            self._progress.done()

    def _look_at(self, group: Sequence[Instance]) -> None:
        answering = [
            each for each in group if not each.ready and readiness.serves(each.plan.connect_host, each.plan.port)
        ]
        # After the answers: what answers on our port may be a stranger, and ours has died of it.
        self._check([each for each in self._everybody() if each.child and (each.ready or each in group)])
        for instance in answering:
            instance.ready_after_s = _age_s(instance)
        self._progress.update([self._row(instance) for instance in group])

    def _row(self, instance: Instance) -> Row:
        where = instance.url + (f", cores {','.join(map(str, instance.plan.cores))}" if instance.plan.cores else "")
        stage = "starting" if instance is self.router else readiness.stage(instance.plan.log_path)
        return Row(instance.name, where, stage, instance.ready_after_s or _age_s(instance), instance.ready)

    def _check(self, group: Sequence[Instance]) -> None:
        for instance in group:
            code = instance.exit_code
            if code is None:
                continue
            found = diagnose(instance.plan.log_path, code)
            when = "while serving" if instance.ready else "before it was ready"
            raise deployment_error(f"{instance.name} {found.how} {when}\n{found.text()}", found.remedy)

    def _too_slow(self, group: Sequence[Instance]) -> DeploymentError:
        late = [instance for instance in group if not instance.ready]
        texts = [f"{each.name}:\n{diagnose(each.plan.log_path, None).text()}" for each in late]
        names = ", ".join(each.name for each in late)
        return deployment_error(
            f"{names} not ready after {self.spec.startup_timeout_s:.0f} s\n" + "\n".join(texts),
            "Give it more time with --startup-timeout, or read the log for what it waits for.",
        )

    def _stop(self, group: Sequence[Instance]) -> None:
        children = [instance.child for instance in group if instance.child]
        for child in children:
            child.terminate()
        give_up_at_s = time.monotonic() + self.spec.stop_timeout_s
        while any(child.exit_code() is None for child in children):
            # A second Ctrl-C, or patience at its end: no more waiting.
            if time.monotonic() > give_up_at_s or self._interruptions() > 1:
                break
            time.sleep(_TICK_S / 2)
        for child in children:
            child.kill()
        for instance in group:
            instance.child = None
            instance.ready_after_s = None

    def _forget_old_traces(self) -> None:
        # Traces are appended to by their owners; those of an earlier run under this name would be read as ours.
        for instance in self._everybody():
            if instance.trace_path:
                instance.trace_path.parent.mkdir(parents=True, exist_ok=True)
                instance.trace_path.unlink(missing_ok=True)

    def _write_state(self, phase: Phase) -> None:
        states = [state for instance in self.instances if (state := instance.state())]
        self._run_dir.write(
            DeploymentState(
                name=self.spec.name,
                phase=phase,
                model=self.model_name,
                model_path=self.spec.model,
                connector=self.spec.connector.value,
                direction=self.spec.effective_direction.value,
                router_url=self.router_url,
                launcher=this_process(),
                created_unix_s=self._created_unix_s,
                run_dir=str(self._run_dir.path.absolute()),
                router=self.router.state(),
                instances=tuple(states),
            )
        )


def _age_s(instance: Instance) -> float:
    return time.monotonic() - instance.child.started_s if instance.child else 0.0

"""`kvbaton bench soak`: clients that come and leave, engines that are killed, and every token compared.

Invariant: whatever happens, what was seen until then is written, and no process is left. The engines' only helper is this
soak: an engine that ended, killed or not, is started again on the same port, as an operator would; the router is never
told. Read `soak_plan` for what is sent, `soak_judge` for what counts as right, `soak_report` for what is written.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

import msgspec

from kvbaton.bench import hand_edit, modes, soak_pools, surroundings
from kvbaton.bench.flags import words_of
from kvbaton.bench.modes import Mode, Setup
from kvbaton.bench.records import Environment
from kvbaton.bench.second_router import second_router
from kvbaton.bench.soak_client import Crowd
from kvbaton.bench.soak_expected import Tokens, ask_expected, expected_path, read_expected, write_expected
from kvbaton.bench.soak_plan import Kill, SoakPlan, plan_soak
from kvbaton.bench.soak_report import KillRecord, PoolRecord, SoakReport, counts_line
from kvbaton.errors import DeploymentError
from kvbaton.launch.machine import Device, parse_cores
from kvbaton.launch.models import resolve_model
from kvbaton.launch.plan import build_plan
from kvbaton.launch.progress import Progress, Row, progress_for
from kvbaton.launch.remedy import usage_error
from kvbaton.launch.spec import Connector
from kvbaton.launch.supervisor import Deployment, Instance, Interrupted
from kvbaton.launch.up import Interruptions
from kvbaton.types import Direction

_TICK_S = 0.1
_POOL_WAIT_S = 90.0
"""Longer than any lease: what is held then is held for ever."""
_RESTARTS = 3
_ENGINE_ARGS = ("--max-num-batched-tokens", "512", "--max-model-len", "4096")
"""Small steps, so that long prompts come in several chunks and transfers in several segments."""
_ONLY_DIRECTION = {Connector.NIXL_PULL: (Direction.PULL,), Connector.NIXL_PUSH: (Direction.PUSH,)}
_DEV_ENDPOINTS = {"VLLM_SERVER_DEV_MODE": "1"}
"""vLLM then lets its prefix cache be reset over HTTP, the one question that tells whether any block is held."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for."""

    mode: Mode
    num_requests: int
    num_at_once: int
    leaving_share: float
    kills_per_engine: int
    deadline_s: float
    patience_s: float
    time_limit_s: float
    seed: int
    out: Path

    @property
    def directions(self) -> tuple[Direction, ...]:
        """An in-tree connector has one; ours has both at once."""
        return _ONLY_DIRECTION.get(self.mode.connector, tuple(Direction))

    def plan(self) -> SoakPlan:
        return plan_soak(
            random.Random(self.seed),  # noqa: S311 - a workload, not a secret
            num_requests=self.num_requests,
            leaving_share=self.leaving_share,
            kills_per_engine=self.kills_per_engine,
            directions=self.directions,
        )


def main(flags: argparse.Namespace, arguments: Sequence[str], out: TextIO) -> int:
    """The exit code: 0 when every promise was kept, 1 when one was not, 130 when it was stopped."""
    settings = settings_from(flags)
    setup = setup_from(flags, flags.model)
    build_plan(modes.spec_of(settings.mode, setup), setup.machine)  # mistakes are seen before anything slow happens
    setup = msgspec.structs.replace(setup, model=resolve_model(flags.model))
    out.write(f"seed {settings.seed}: {settings.num_requests} requests, {settings.mode.title}\n")
    out.flush()
    plan = settings.plan()
    environment = surroundings.environment(arguments, len(setup.cores))
    with Interruptions() as interruptions, tempfile.TemporaryDirectory(prefix="kvbaton-hand-edit-") as edit_dir:
        soak = Soak(settings, setup, plan, interruptions, out)
        try:
            expected = soak.expected()
            env = hand_edit.write_hand_edit(Path(edit_dir)) if settings.mode.is_hand_edited else {}
            outcome = soak.run(expected, env)
        except Interrupted:
            out.write("stopped before the load began; nothing was measured and nothing written\n")
            return 130
    report = _report(settings, setup, outcome, environment)
    folder = settings.out / settings.mode.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_bytes(report.encode())
    (folder / "summary.md").write_text(report.summary(), encoding="utf-8")
    out.write(f"\n{report.summary()}\nwritten to {folder}/: report.json, summary.md\n")
    if interruptions.count:
        return 130
    return 1 if report.complaints or report.stopped else 0


def settings_from(flags: argparse.Namespace) -> Settings:
    """UsageError for what cannot be run."""
    for flag, value, least in (
        ("--requests", flags.requests, 1),
        ("--concurrency", flags.concurrency, 1),
        ("--kills", flags.kills, 0),
        ("--deadline", flags.deadline, 1),
        ("--patience", flags.patience, 1),
        ("--time-limit", flags.time_limit, 1),
    ):
        if not value >= least:
            raise usage_error(f"{flag}: {value} is too small", f"Give at least {least}.")
    if not 0 <= flags.cancel_share < 1:
        raise usage_error(f"--cancel-share: {flags.cancel_share} is no share", "Give a number from 0 to below 1.")
    if flags.kills and flags.requests < 4 * flags.kills:
        raise usage_error(
            f"{flags.requests} requests are too few for {2 * flags.kills} kills",
            f"Use --requests {4 * flags.kills} or more, or fewer --kills.",
        )
    return Settings(
        mode=_mode_named(flags.mode),
        num_requests=flags.requests,
        num_at_once=flags.concurrency,
        leaving_share=flags.cancel_share,
        kills_per_engine=flags.kills,
        deadline_s=flags.deadline,
        patience_s=flags.patience,
        time_limit_s=flags.time_limit,
        seed=flags.seed,
        out=Path(flags.out),
    )


def _mode_named(name: str) -> Mode:
    if name == "kvbaton":
        return msgspec.structs.replace(modes.KVBATON_PUSH, name="kvbaton", title="kvbaton, push and pull")
    return modes.modes_named(name)[0]


def setup_from(flags: argparse.Namespace, model: str) -> Setup:
    """The pair: float32, because every token must be equal, and prefix caching on, because it is where slots go wrong."""
    machine = surroundings.bench_machine()
    cores = parse_cores(flags.cores) if flags.cores else machine.cores[:2]
    if machine.device is Device.CPU and len(cores) != 2:
        raise usage_error(f"--cores: {len(cores)} cores; a pair needs two", "Name two cores, as in --cores 0,1.")
    return Setup(
        model=model,
        state_root=Path(flags.state_dir),
        machine=machine,
        cores=cores,
        dtype="float32",
        engine_args=_ENGINE_ARGS,
        startup_timeout_s=flags.startup_timeout,
        trace=True,
        engine_command=words_of(flags.engine_command),
        router_command=words_of(flags.router_command),
    )


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What the load left behind."""

    crowd: Crowd
    took_s: float
    stopped: str | None
    kills: tuple[KillRecord, ...]
    pools: tuple[PoolRecord, ...]


class Soak:
    """One soak: expected answers, then the pair under load and fire."""

    def __init__(
        self, settings: Settings, setup: Setup, plan: SoakPlan, interruptions: Interruptions, out: TextIO
    ) -> None:
        self._settings = settings
        self._setup = setup
        self._plan = plan
        self._interruptions = interruptions
        self._out = out

    def expected(self) -> Tokens:
        """From the results folder, or asked of one engine with all cores."""
        identity = {
            "model": self._setup.model,
            "engine": " ".join(self._setup.engine_args),
            "vllm": surroundings.versions().get("vllm", ""),
        }
        path = expected_path(self._settings.out, self._plan, identity)
        tokens = read_expected(path)
        if tokens is None:
            with self._deployment(modes.AGGREGATED, {}) as deployment, self._showing("one engine alone") as show:
                tokens = ask_expected(deployment, self._plan, self._settings.num_at_once, show)
            write_expected(path, tokens)
        return tokens

    def run(self, expected: Tokens, env: dict[str, str]) -> Outcome:
        """The pair lived through it, or not; either way this is how it went."""
        mode = self._settings.mode
        if mode.is_in_tree:
            hand_edit.check_nixl_package()
        with contextlib.ExitStack() as stack:
            deployment = stack.enter_context(self._deployment(mode, env | _DEV_ENDPOINTS))
            if mode.is_hand_edited:
                hand_edit.check_hand_edit(deployment.instances)
            urls = {deployment.spec.effective_direction: deployment.router_url}
            for direction in self._settings.directions:
                if direction not in urls:
                    urls[direction] = stack.enter_context(second_router(deployment, direction))
            return self._under_fire(deployment, expected, urls)

    def _under_fire(self, deployment: Deployment, expected: Tokens, urls: Mapping[Direction, str]) -> Outcome:
        settings = self._settings
        crowd = Crowd(
            self._plan,
            expected,
            urls,
            deployment.model_name,
            num_at_once=settings.num_at_once,
            deadline_s=settings.deadline_s,
            patience_s=settings.patience_s,
        )
        fire = Fire(deployment, crowd, self._plan.kills)
        crowd.start()
        stopped = None
        with self._showing(settings.mode.title) as show:
            try:
                while stopped is None and not crowd.is_over:
                    show(self._progress_text(crowd))
                    fire.look()
                    stopped = self._reason_to_stop(crowd)
                    time.sleep(_TICK_S)
            except Interrupted:
                stopped = "stopped by the user"
            except DeploymentError as error:
                stopped = f"an engine did not come back: {str(error).splitlines()[0]}"
            if stopped is not None:
                show("waiting for open requests to end")
            crowd.stop()
        took_s = crowd.now_s
        pools = [soak_pools.wait_for(each, _POOL_WAIT_S) for each in deployment.instances if each.exit_code is None]
        return Outcome(crowd=crowd, took_s=took_s, stopped=stopped, kills=tuple(fire.records), pools=tuple(pools))

    def _reason_to_stop(self, crowd: Crowd) -> str | None:
        if self._interruptions.count:
            return "stopped by the user"
        if crowd.now_s > self._settings.time_limit_s:
            return f"not finished within the time limit of {self._settings.time_limit_s:.0f} s"
        return None

    def _progress_text(self, crowd: Crowd) -> str:
        total = self._settings.num_requests
        done = crowd.num_ended
        left = f", about {crowd.now_s / done * (total - done):.0f} s left" if done else ""
        return f"{done} of {total} ended{left}; {counts_line(list(crowd.attempts))}"

    def _deployment(self, mode: Mode, env: dict[str, str]) -> Deployment:
        return Deployment(
            modes.spec_of(mode, self._setup, env),
            machine=self._setup.machine,
            progress=progress_for(self._out),
            interruptions=lambda: self._interruptions.count,
        )

    @contextlib.contextmanager
    def _showing(self, name: str) -> Iterator[Callable[[str], None]]:
        progress: Progress = progress_for(self._out)
        began_s = time.monotonic()

        def show(stage: str) -> None:
            progress.update([Row(name, "", stage, time.monotonic() - began_s, ready=False)])

        try:
            yield show
        finally:
            progress.done()


class Fire:
    """Kills engines when it is their turn, and starts again whatever has ended."""

    def __init__(self, deployment: Deployment, crowd: Crowd, kills: Sequence[Kill]) -> None:
        self._deployment = deployment
        self._crowd = crowd
        self._kills = list(kills)
        self.records: list[KillRecord] = []

    def look(self) -> None:
        """Everybody serves when this returns. DeploymentError for an engine that does not come back."""
        while self._kills and self._crowd.num_ended >= self._kills[0].after_requests:
            victim = self._deployment.by_role(self._kills.pop(0).role)[0]
            killed_s = self._crowd.now_s
            self._deployment.kill(victim)
            self._start_again(victim, killed_s, is_ours=True)
        for instance in self._deployment.instances:
            if instance.exit_code is not None:
                self._start_again(instance, self._crowd.now_s, is_ours=False)

    def _start_again(self, instance: Instance, killed_s: float, *, is_ours: bool) -> None:
        after_requests = self._crowd.num_ended
        for turn in range(_RESTARTS):
            try:
                self._deployment.start(instance)
                break
            except DeploymentError:
                if turn + 1 == _RESTARTS:
                    raise
                # Another one may have died meanwhile. It is not waited for now: the next look finds it.
                for other in self._deployment.instances:
                    if other is not instance and other.exit_code is not None:
                        self._deployment.kill(other)
        self.records.append(
            KillRecord(
                engine=instance.name,
                is_ours=is_ours,
                after_requests=after_requests,
                killed_s=round(killed_s, 3),
                served_s=round(self._crowd.now_s, 3),
            )
        )


def _report(settings: Settings, setup: Setup, outcome: Outcome, environment: Environment) -> SoakReport:
    return SoakReport(
        mode=settings.mode.name,
        title=settings.mode.title,
        model=setup.model,
        settings={
            "seed": settings.seed,
            "requests": settings.num_requests,
            "at once": settings.num_at_once,
            "leaving share": settings.leaving_share,
            "kills per engine": settings.kills_per_engine,
            "deadline s": settings.deadline_s,
            "patience s": settings.patience_s,
            "engine arguments": " ".join(setup.engine_args),
            "dtype": setup.dtype or "",
        },
        environment=environment,
        took_s=round(outcome.took_s, 1),
        stopped=outcome.stopped,
        attempts=tuple(sorted(outcome.crowd.attempts, key=lambda each: each.ended_s)),
        kills=outcome.kills,
        pools=outcome.pools,
    )

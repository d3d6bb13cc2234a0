"""`kvbaton bench compare`: one workload through several ways of serving, each started anew, in turns.

Invariant: a mode that does not start, dies, fails or takes too long is a row that says so, and the next one is tried;
Ctrl-C ends everything, and what was measured until then is written. Every run has prompts of its own.
Read `modes` for what is compared, `load` for the load generator, `comparison` for what is written.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

import msgspec

from kvbaton.bench import hand_edit, modes, pictures, surroundings
from kvbaton.bench.client import run_load
from kvbaton.bench.comparison import Comparison, run_line
from kvbaton.bench.flags import words_of
from kvbaton.bench.load import BenchRun, Load, run_bench
from kvbaton.bench.metrics import figures_of
from kvbaton.bench.modes import Mode, Setup
from kvbaton.bench.records import RequestRecord, RunReport
from kvbaton.bench.trial import failures_text
from kvbaton.bench.workload import Workload, plan_requests
from kvbaton.errors import BatonError, DeploymentError, UsageError
from kvbaton.launch.machine import Device, parse_cores
from kvbaton.launch.models import resolve_model
from kvbaton.launch.plan import build_plan
from kvbaton.launch.progress import Progress, Row, progress_for
from kvbaton.launch.remedy import deployment_error, usage_error
from kvbaton.launch.supervisor import Deployment, Interrupted
from kvbaton.launch.up import Interruptions

_WARM_UP_REQUESTS = 5
_WARM_UP_SEED = 1_000_000
"""Far from the seeds of runs."""
_LAST_BREATH_S = 1.5
_TAIL_S = 90.0
"""What a run may well need beyond the time in which its requests arrive."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for."""

    modes: tuple[Mode, ...]
    load: Load
    iterations: int
    deadline_s: float
    seed: int
    out: Path
    bench_command: tuple[str, ...] | None


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One mode's turn."""

    mode: Mode
    iteration: int
    seed: int


def main(flags: argparse.Namespace, arguments: Sequence[str], out: TextIO) -> int:
    """The exit code: 0 when every run gave all its answers, 1 when some failed, 130 when it was stopped."""
    pictures.check_installed()
    settings = settings_from(flags)
    setup = setup_from(flags, flags.model)
    for mode in settings.modes:
        build_plan(modes.spec_of(mode, setup), setup.machine)  # mistakes are seen before anything slow happens
    setup = msgspec.structs.replace(setup, model=resolve_model(flags.model))
    comparison = Comparison(
        settings.modes,
        setup,
        settings.load,
        surroundings.environment(arguments, len(setup.cores)),
        iterations=settings.iterations,
    )
    with Interruptions() as interruptions, tempfile.TemporaryDirectory(prefix="kvbaton-hand-edit-") as edit_dir:
        bench = Bench(settings, setup, Path(edit_dir), interruptions, out)
        with contextlib.suppress(Interrupted):
            for round_, report, commands in bench.rounds():
                comparison.add(round_.mode, report, commands)
                out.write(f"  {run_line(report)}\n")
                out.flush()
    if comparison.is_empty:
        out.write("stopped; nothing was measured and nothing written\n")
        return 130
    comparison.write(settings.out)
    out.write(f"\n{comparison.text()}\n\nwritten to {settings.out}/: chart.png, report.json, summary.md, results/\n")
    if interruptions.count:
        return 130
    return 1 if comparison.has_failures else 0


def settings_from(flags: argparse.Namespace) -> Settings:
    """UsageError for what cannot be run."""
    load = Load(
        num_prompts=flags.num_prompts,
        rate_per_s=flags.rate,
        input_tokens=flags.input_len,
        output_tokens=flags.output_len,
    )
    for flag, value in (
        ("--num-prompts", load.num_prompts),
        ("--rate", load.rate_per_s),
        ("--input-len", load.input_tokens),
        ("--output-len", load.output_tokens),
        ("--iterations", flags.iterations),
        ("--deadline", flags.deadline),
    ):
        if not value > 0:
            raise usage_error(f"{flag}: {value} is not positive", "Give a number above zero.")
    arriving_s = load.num_prompts / load.rate_per_s
    if arriving_s >= flags.deadline:
        raise usage_error(
            f"{load.num_prompts} requests at {load.rate_per_s:g} per second arrive in {arriving_s:.0f} s, "
            f"and the deadline is {flags.deadline:.0f} s",
            f"Use --deadline {arriving_s + _TAIL_S:.0f}, fewer --num-prompts or a higher --rate.",
        )
    return Settings(
        modes=modes.modes_named(flags.modes),
        load=load,
        iterations=flags.iterations,
        deadline_s=flags.deadline,
        seed=flags.seed,
        out=Path(flags.out),
        bench_command=words_of(flags.bench_command),
    )


def setup_from(flags: argparse.Namespace, model: str) -> Setup:
    """What all modes share. Everybody has prefix caching off: a prompt that was seen before would look fast."""
    machine = surroundings.bench_machine()
    cores = parse_cores(flags.cores) if flags.cores else machine.cores[:2]
    if machine.device is Device.CPU and len(cores) != 2:
        raise usage_error(
            f"--cores: {len(cores)} cores; the comparison needs two, one for each engine of a pair",
            "Name two cores, as in --cores 0,1.",
        )
    emulated = machine.device is Device.CPU and not surroundings.computes_bfloat16()
    return Setup(
        model=model,
        state_root=Path(flags.state_dir),
        machine=machine,
        cores=cores,
        dtype=flags.dtype or ("float32" if emulated else None),
        engine_args=("--no-enable-prefix-caching",),
        startup_timeout_s=flags.startup_timeout,
        engine_command=words_of(flags.engine_command),
        router_command=words_of(flags.router_command),
    )


class Bench:
    """Plays all rounds, one deployment at a time."""

    def __init__(
        self, settings: Settings, setup: Setup, edit_dir: Path, interruptions: Interruptions, out: TextIO
    ) -> None:
        self._settings = settings
        self._setup = setup
        self._edit_dir = edit_dir
        self._interruptions = interruptions
        self._out = out

    def rounds(self) -> Iterator[tuple[Round, RunReport, tuple[str, ...]]]:
        """Each round, what came of it and the commands that were run. Interrupted when a stop was asked for."""
        settings = self._settings
        turns = [(iteration, mode) for iteration in range(settings.iterations) for mode in settings.modes]
        for number, (iteration, mode) in enumerate(turns):
            round_ = Round(mode=mode, iteration=iteration, seed=settings.seed + number)
            self._out.write(f"[{number + 1}/{len(turns)}] {mode.title}\n")
            self._out.flush()
            yield round_, *self._play(round_)

    def _play(self, round_: Round) -> tuple[RunReport, tuple[str, ...]]:
        commands: tuple[str, ...] = ()
        try:
            deployment = self._deployment(round_.mode)
            commands = tuple(each.shell() for each in (*deployment.plan.engines, deployment.plan.router))
            with deployment:
                if round_.mode.is_hand_edited:
                    hand_edit.check_hand_edit(deployment.instances)
                try:
                    self._warm_up(deployment)
                    return self._measure(round_, deployment), commands
                except DeploymentError:
                    _blame_the_dead(deployment)
                    raise
        except UsageError:
            raise
        except BatonError as error:
            failure = "\n".join([str(error), *getattr(error, "__notes__", [])])
            return RunReport(iteration=round_.iteration, seed=round_.seed, figures=None, failure=failure), commands

    def _deployment(self, mode: Mode) -> Deployment:
        if mode.is_in_tree:
            hand_edit.check_nixl_package()
        env = hand_edit.write_hand_edit(self._edit_dir) if mode.is_hand_edited else {}
        return Deployment(
            modes.spec_of(mode, self._setup, env),
            machine=self._setup.machine,
            progress=progress_for(self._out),
            interruptions=lambda: self._interruptions.count,
        )

    def _warm_up(self, deployment: Deployment) -> None:
        """A few requests as long as the measured ones, of other tokens."""
        load = self._settings.load
        workload = Workload(
            num_requests=_WARM_UP_REQUESTS,
            rate_per_s=load.rate_per_s,
            min_input_tokens=load.input_tokens,
            max_input_tokens=load.input_tokens,
            output_tokens=min(load.output_tokens, 4),
        )
        planned = plan_requests(
            workload,
            random.Random(_WARM_UP_SEED),  # noqa: S311 - a workload, not a secret
            random.Random(_WARM_UP_SEED),  # noqa: S311
            vocabulary_tokens=surroundings.vocabulary_tokens(self._setup.model),
        )
        with _showing("warm-up", progress_for(self._out)) as show:
            deadline_s = self._settings.deadline_s
            finished: list[RequestRecord] = []
            for number, each in enumerate(planned):
                show(f"{number} of {len(planned)} answered")
                alone = [msgspec.structs.replace(each, due_s=0.0)]
                sent_s = time.monotonic()
                finished += run_load(
                    deployment.router_url,
                    deployment.model_name,
                    alone,
                    attend=deployment.attend,
                    deadline_s=deadline_s,
                )
                deadline_s -= time.monotonic() - sent_s
        failure = failures_text(finished)
        if failure is not None:
            raise deployment_error(f"warm-up: {failure}", f"Read {deployment.router.log_path} and the logs beside it.")

    def _measure(self, round_: Round, deployment: Deployment) -> RunReport:
        settings = self._settings
        name = settings.load.file_name(round_.mode.name, round_.iteration)
        run = BenchRun(
            load=settings.load,
            seed=round_.seed,
            url=deployment.router_url,
            model=self._setup.model,
            model_name=deployment.model_name,
            result_path=settings.out.absolute() / "results" / name,
            log_path=Path(deployment.router.plan.log_path).with_name("bench.log"),
            metadata={"mode": round_.mode.name, "cores": modes.cores_text(round_.mode, self._setup)},
            command=settings.bench_command,
        )
        cpu_before_s = surroundings.cpu_s(deployment.instances)
        with _showing(round_.mode.title, progress_for(self._out)) as show:
            records = run_bench(run, attend=deployment.attend, deadline_s=settings.deadline_s, on_progress=show)
        return RunReport(
            iteration=round_.iteration,
            seed=round_.seed,
            figures=figures_of(records),
            failure=failures_text(records),
            results_file=f"results/{name}",
            engine_cpu_s=round(surroundings.cpu_s(deployment.instances) - cpu_before_s, 2),
        )


def _blame_the_dead(deployment: Deployment) -> None:
    """DeploymentError when an engine has died: whoever talked to it may have noticed first, and knows less."""
    give_up_at_s = time.monotonic() + _LAST_BREATH_S
    while time.monotonic() < give_up_at_s:
        deployment.check()
        time.sleep(0.1)


class _Shown:
    """A line of progress with its own clock."""

    def __init__(self, name: str, progress: Progress) -> None:
        self._name = name
        self._progress = progress
        self._began_s = time.monotonic()

    def __call__(self, stage: str) -> None:
        elapsed_s = time.monotonic() - self._began_s
        self._progress.update([Row(self._name, "", stage, elapsed_s, ready=False)])


@contextlib.contextmanager
def _showing(name: str, progress: Progress) -> Iterator[_Shown]:
    try:
        yield _Shown(name, progress)
    finally:
        progress.done()

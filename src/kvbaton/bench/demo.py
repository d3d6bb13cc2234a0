"""`kvbaton demo`: a real answer through a prefill and a decode engine, that request's timeline, and a small comparison.

Invariant: ends by itself, and whatever happens no process is left; files are written at the end, all or none, so an
interrupted demo leaves those of the one before. Steps: `_first_act` asks, `_second_act` compares, `_write` keeps.
Read `conversation` and `trial` for the two acts, `modes` for what is compared.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import msgspec

from kvbaton.bench import modes, passage, pictures, summary, surroundings, text
from kvbaton.bench.conversation import ask, timeline_of
from kvbaton.bench.modes import Mode, Setup
from kvbaton.bench.pace import paced_workload
from kvbaton.bench.records import Environment, ModeReport, Report, RunReport
from kvbaton.bench.second_router import second_router
from kvbaton.bench.timeline import Timeline
from kvbaton.bench.trial import Trial
from kvbaton.bench.workload import PlannedRequest, Workload, plan_requests
from kvbaton.launch.machine import Device
from kvbaton.launch.models import resolve_model
from kvbaton.launch.progress import Progress, progress_for
from kvbaton.launch.supervisor import Deployment, Interrupted
from kvbaton.launch.up import Interruptions

_SEED = 25
"""Its first few arrivals, however many, are neither a burst nor far apart: a few requests are to show what many would."""
_FILES = ("timeline.png", "chart.png", "report.json", "summary.md")
_CHUNK_TOKENS = 256
"""What an engine computes in one step; smaller than the prompts, so that KV goes over while prefill goes on."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much is done."""

    input_tokens: tuple[int, int]
    output_tokens: int
    num_requests: tuple[int, int]
    watch_s: float
    """How long one mode's requests should take to arrive."""
    answer_tokens: int


FULL = Sizes(input_tokens=(400, 600), output_tokens=24, num_requests=(4, 10), watch_s=32.0, answer_tokens=64)
QUICK = Sizes(input_tokens=(100, 200), output_tokens=8, num_requests=(3, 3), watch_s=3.0, answer_tokens=16)


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """What both acts play with."""

    setup: Setup
    sizes: Sizes
    vocabulary_tokens: int
    out: TextIO
    progress: Progress
    interruptions: Interruptions

    def deployment(self, mode: Mode) -> Deployment:
        spec = modes.spec_of(mode, self.setup)
        # Progress of its own: the plain one says of each name only once that it is ready.
        return Deployment(
            spec,
            machine=self.setup.machine,
            progress=progress_for(self.out),
            interruptions=lambda: self.interruptions.count,
        )


class Acts(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen."""

    answer: str
    timeline: Timeline | None
    workload: Workload
    modes: tuple[ModeReport, ...]


def main(flags: argparse.Namespace, arguments: Sequence[str], out: TextIO) -> int:
    """The exit code: 0 when everything was shown and written, 1 when requests failed, 130 when it was stopped."""
    began_s = time.monotonic()
    pictures.check_installed()
    model = resolve_model(flags.model)
    stage_setup = _setup(model, Path(flags.state_dir))
    where = surroundings.environment(arguments, len(stage_setup.cores))
    with Interruptions() as interruptions:
        stage = Stage(
            setup=stage_setup,
            sizes=QUICK if flags.quick else FULL,
            vocabulary_tokens=surroundings.vocabulary_tokens(model),
            out=out,
            progress=progress_for(out),
            interruptions=interruptions,
        )
        try:
            acts = _play(stage, flags.question)
        except Interrupted:
            stage.progress.note("stopped; nothing was written")
            return 130
    report = _report(stage, acts, where)
    _show(report, acts, out)
    took_s = time.monotonic() - began_s
    names = _write(report, acts, Path(flags.out), took_s)
    out.write(f"\nwritten to {flags.out}/: {', '.join(names)} ({took_s:.0f} s in all)\n")
    return 1 if any(run.failure for mode in report.modes for run in mode.runs) else 0


def _setup(model: str, state_root: Path) -> Setup:
    machine = surroundings.bench_machine()
    on_cpu = machine.device is Device.CPU
    return Setup(
        model=model,
        state_root=state_root,
        machine=machine,
        cores=machine.cores,
        dtype="float32" if on_cpu and not surroundings.computes_bfloat16() else None,
        engine_args=("--max-num-batched-tokens", str(_CHUNK_TOKENS)),
        trace=True,
    )


def _play(stage: Stage, question: str) -> Acts:
    note = stage.progress.note
    note(f"Two engines and a router: {Path(stage.setup.model).name}, one prefills, the other decodes (half a minute)")
    with stage.deployment(modes.KVBATON_PUSH) as pair:
        answer, timeline = _first_act(stage, pair, question)
        note("\nThe same small load three times, on prompts nobody has seen. Prefill pushes KV to decode:")
        workload, push = _second_act(stage, pair)
        with second_router(pair, modes.KVBATON_PULL.direction) as url:
            note("Decode pulls KV from prefill, same engines, a second router:")
            pull = _trial(stage, modes.KVBATON_PULL, pair, url).run(_plan(stage, workload, 2), _SEED)
    note("One engine that does both, on all the cores that the pair had:")
    with stage.deployment(modes.AGGREGATED) as alone:
        aggregated = _trial(stage, modes.AGGREGATED, alone, alone.router_url).run(_plan(stage, workload, 3), _SEED)
    reports = (
        _mode_report(stage, modes.AGGREGATED, alone, aggregated),
        _mode_report(stage, modes.KVBATON_PULL, pair, pull),
        _mode_report(stage, modes.KVBATON_PUSH, pair, push),
    )
    return Acts(answer=answer, timeline=timeline, workload=workload, modes=reports)


def _first_act(stage: Stage, pair: Deployment, question: str) -> tuple[str, Timeline | None]:
    """A real question, its answer as it comes, and the way it took."""
    # The first request of an engine is slow, whatever it is: it would show in the timeline.
    _trial(stage, modes.KVBATON_PUSH, pair, pair.router_url).warm_up(_warm_ups(stage, 1))
    stage.out.write(f"\n> {question}\n\n")
    answer = ask(pair, passage.prompt(question), stage.sizes.answer_tokens, stage.out)
    timeline = timeline_of(pair, answer.request_id)
    shown = "no timeline: the traces do not know this request" if timeline is None else text.timeline_text(timeline)
    stage.out.write(f"\n\n{shown}\n")
    return answer.text.strip(), timeline


def _second_act(stage: Stage, pair: Deployment) -> tuple[Workload, RunReport]:
    """A load this machine can bear, and how the pair bore it."""
    trial = _trial(stage, modes.KVBATON_PUSH, pair, pair.router_url)
    prefill_s = trial.warm_up(_warm_ups(stage, 2))
    workload = paced_workload(
        prefill_s=prefill_s,
        watch_s=stage.sizes.watch_s,
        input_tokens=stage.sizes.input_tokens,
        output_tokens=stage.sizes.output_tokens,
        num_requests=stage.sizes.num_requests,
    )
    stage.progress.note(f"  {summary.workload_text(workload)}")
    return workload, trial.run(_plan(stage, workload, 1), _SEED)


def _trial(stage: Stage, mode: Mode, deployment: Deployment, url: str) -> Trial:
    return Trial(deployment, url, mode.title, stage.progress)


def _plan(stage: Stage, workload: Workload, number: int) -> tuple[PlannedRequest, ...]:
    """The same arrivals and lengths every time, and prompts that no engine has in its prefix cache."""
    return plan_requests(
        workload,
        random.Random(_SEED),  # noqa: S311 - a workload, not a secret
        random.Random(_SEED + number),  # noqa: S311
        vocabulary_tokens=stage.vocabulary_tokens,
    )


def _warm_ups(stage: Stage, number: int) -> tuple[PlannedRequest, ...]:
    longest = stage.sizes.input_tokens[1]
    workload = Workload(
        num_requests=number, rate_per_s=1.0, min_input_tokens=longest, max_input_tokens=longest, output_tokens=2
    )
    return _plan(stage, workload, 100 + number)


def _mode_report(stage: Stage, mode: Mode, deployment: Deployment, run: RunReport) -> ModeReport:
    return ModeReport(
        name=mode.name,
        title=mode.title,
        cores=modes.cores_text(mode, stage.setup),
        is_hand_edited=False,
        commands=tuple(plan.shell() for plan in (*deployment.plan.engines, deployment.plan.router)),
        runs=(run,),
    )


def _report(stage: Stage, acts: Acts, where: Environment) -> Report:
    return Report(
        kind="demo",
        model=stage.setup.model,
        workload=msgspec.structs.asdict(acts.workload) | {"dtype": stage.setup.dtype or "bfloat16"},
        environment=where,
        modes=acts.modes,
    )


def _show(report: Report, acts: Acts, out: TextIO) -> None:
    out.write(f"\n{summary.workload_text(acts.workload)}\n\n{text.table(text.comparison_rows(report.modes))}\n")
    out.writelines(f"{mode.title}: {run.failure}\n" for mode in report.modes for run in mode.runs if run.failure)
    out.write(f"\n{summary.CORES_NOTE}\n")


def _write(report: Report, acts: Acts, folder: Path, took_s: float) -> list[str]:
    """The names of the files that are there now; those of an earlier demo are not."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)
    if acts.timeline is not None:
        title = f"One request through two engines: {Path(report.model).name} on {report.environment.num_cores} cores"
        pictures.draw_timeline(acts.timeline, title, folder / "timeline.png")
    title = f"{Path(report.model).name}: {summary.workload_text(acts.workload)}"
    pictures.draw_comparison(report.modes, title, folder / "chart.png")
    (folder / "report.json").write_bytes(report.encode())
    document = summary.demo_summary(report, acts.workload, acts.answer, acts.timeline, took_s)
    (folder / "summary.md").write_text(document, encoding="utf-8")
    return [name for name in _FILES if (folder / name).exists()]

"""Collects the runs of a comparison and writes them: table, report, chart, summary.

Invariant: a mode keeps its place in the order asked for and all its runs, failed ones too. Read `compare` for where they
come from and `text` for the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvbaton.bench import modes, pictures, summary, text
from kvbaton.bench.load import Load
from kvbaton.bench.modes import Mode, Setup
from kvbaton.bench.records import Environment, ModeReport, Report, RunReport

_ROW_NOTE = (
    "Each row: median over the runs of the mean (or 99th percentile) within a run, in brackets the least and the greatest. "
    "A request that ended early counts as failed, also where `vllm bench serve` counts it as completed."
)
_ENGINE_NOTE = (
    "Every engine: executor uni, its cores for itself, as many OMP threads as cores, prefix caching off, a warm-up of "
    "5 requests; router and load generator share the machine with them. Engines' CPU counts while the load generator starts, "
    "too: it shows who computes without having work."
)
_EDIT_NOTE = (
    "NIXL as shipped polls without a pause in a thread that takes a whole core from each of the in-tree engines. `hand-edited` "
    "rows run the same NIXL with that pause (pthrDelay) set to 1 ms through a generated sitecustomize.py; no option of vLLM or "
    "NIXL does that. With spare cores the difference would be far smaller. kvbaton needs no edit: it runs without that thread."
)


class Comparison:
    """What has been measured so far."""

    def __init__(
        self, chosen: Sequence[Mode], setup: Setup, load: Load, environment: Environment, *, iterations: int
    ) -> None:
        self._modes = tuple(chosen)
        self._setup = setup
        self._load = load
        self._environment = environment
        self._iterations = iterations
        self._runs: dict[str, list[RunReport]] = {}
        self._commands: dict[str, tuple[str, ...]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._runs

    @property
    def has_failures(self) -> bool:
        return any(run.failure for runs in self._runs.values() for run in runs)

    def add(self, mode: Mode, run: RunReport, commands: tuple[str, ...]) -> None:
        self._runs.setdefault(mode.name, []).append(run)
        self._commands[mode.name] = commands or self._commands.get(mode.name, ())

    def report(self) -> Report:
        return Report(
            kind="compare",
            model=self._setup.model,
            workload={
                "num_prompts": self._load.num_prompts,
                "rate_per_s": self._load.rate_per_s,
                "input_tokens": self._load.input_tokens,
                "output_tokens": self._load.output_tokens,
                "iterations": self._iterations,
                "dtype": self._setup.dtype or "bfloat16",
            },
            environment=self._environment,
            modes=tuple(self._mode_report(mode) for mode in self._modes if mode.name in self._runs),
        )

    def text(self) -> str:
        """The table, and why rows are without figures."""
        report = self.report()
        lines = [self._load_text(), "", text.table(text.comparison_rows(report.modes))]
        for mode in report.modes:
            lines += [f"{mode.title}: {first_line(run.failure)}" for run in mode.runs if run.failure]
        return "\n".join(lines)

    def write(self, folder: Path) -> None:
        report = self.report()
        folder.mkdir(parents=True, exist_ok=True)
        title = f"{Path(report.model).name}: {self._load_text()}"
        pictures.draw_comparison(report.modes, title, folder / "chart.png")
        (folder / "report.json").write_bytes(report.encode())
        (folder / "summary.md").write_text(
            summary.compare_summary(report, [f"workload: {self._load_text()}"], self._notes()), encoding="utf-8"
        )

    def _notes(self) -> list[str]:
        return [_ROW_NOTE, _ENGINE_NOTE] + [_EDIT_NOTE] * any(mode.is_in_tree for mode in self._modes)

    def _mode_report(self, mode: Mode) -> ModeReport:
        return ModeReport(
            name=mode.name,
            title=mode.title,
            cores=modes.cores_text(mode, self._setup),
            is_hand_edited=mode.is_hand_edited,
            commands=self._commands[mode.name],
            runs=tuple(self._runs[mode.name]),
        )

    def _load_text(self) -> str:
        load = self._load
        return (
            f"{load.num_prompts} requests at {load.rate_per_s:g}/s, {load.input_tokens} tokens in, {load.output_tokens} out, "
            f"{self._setup.dtype or 'bfloat16'}, {self._iterations} x"
        )


def run_line(run: RunReport) -> str:
    """One run in one line."""
    if run.figures is None:
        return f"failed: {first_line(run.failure or 'for no known reason')}"
    parts = []
    if run.figures.ttft_ms is not None:
        parts.append(f"TTFT mean {run.figures.ttft_ms.mean:,.0f} ms, p99 {run.figures.ttft_ms.p99:,.0f} ms")
    if run.figures.tpot_ms is not None:
        parts.append(f"TPOT mean {run.figures.tpot_ms.mean:,.1f} ms")
    parts.append(f"{run.figures.failed} failed")
    return ", ".join(parts)


def first_line(failure: str) -> str:
    """What it says, without the log it quotes."""
    return failure.splitlines()[0] if failure else ""

"""The summary files: what was run, where, and what came out, for people.

Invariant: no figure without the command, versions, date and core count it was made with.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvbaton.bench import text
from kvbaton.bench.records import Environment, Report
from kvbaton.bench.timeline import Timeline
from kvbaton.bench.workload import Workload

CORES_NOTE = (
    "How to read it: every row has the same cores. One engine alone can use all of them for each prompt (TTFT), but prompts\n"
    "hold up its decoding; the pair gives each engine its share, and its decode is not held up by other people's prompts\n"
    "(TPOT). One run of a few requests each, at a rate set by this machine's prefill: which row is ahead changes with the\n"
    "rate and from run to run. It shows that the handoff works and what it costs, not what it gains on a cluster; for\n"
    "figures to compare, use `kvbaton bench compare` with --iterations 3 or more."
)
_LOAD_NOTE = (
    "Arrivals and lengths are the same, prompts fresh for each. Sent by kvbaton's own small client; `kvbaton bench compare` "
    "uses `vllm bench serve`."
)


def workload_text(workload: Workload) -> str:
    """The load in half a line."""
    return (
        f"{workload.num_requests} requests at {workload.rate_per_s:.3g}/s, {workload.min_input_tokens}-"
        f"{workload.max_input_tokens} tokens in, {workload.output_tokens} out"
    )


def environment_lines(where: Environment) -> list[str]:
    """As a Markdown list."""
    versions = ", ".join(f"{name} {version}" for name, version in where.versions.items())
    lines = [f"* command: `{where.command}`", f"* date: {where.date}", f"* machine: {where.machine}"]
    lines += [f"* cores used by engines: {where.num_cores}", f"* versions: {versions}"]
    if where.load_at_start is not None:
        lines.append(f"* load average before the start: {where.load_at_start} (much above 0: the machine was not ours)")
    return lines


def demo_summary(report: Report, workload: Workload, answer: str, timeline: Timeline | None, took_s: float) -> str:
    """The demo's summary.md."""
    model = Path(report.model).name
    parts = [
        f"# kvbaton demo: {model}",
        "\n".join([*environment_lines(report.environment), f"* took {took_s:.0f} s, starting and stopping included"]),
        f"## One request, prefill engine to decode engine\n\n> {' '.join(answer.split()) or '(no text)'}",
    ]
    if timeline is not None:
        parts += [f"```\n{text.timeline_text(timeline)}\n```", "![timeline](timeline.png)"]
    parts += [
        f"## The same load, three ways\n\n{workload_text(workload)}; {report.workload['dtype']}. {_LOAD_NOTE}",
        text.markdown_table(text.comparison_rows(report.modes)),
        "![chart](chart.png)",
        CORES_NOTE.replace("\n", " "),
    ]
    return "\n\n".join(parts) + "\n"


def compare_summary(report: Report, settings: Sequence[str], notes: Sequence[str]) -> str:
    """The comparison's summary.md."""
    failures = [
        f"* {mode.title}, iteration {run.iteration}: {' '.join(run.failure.split())[:300]}"
        for mode in report.modes
        for run in mode.runs
        if run.failure
    ]
    parts = [
        f"# kvbaton bench compare: {Path(report.model).name}",
        "\n".join(environment_lines(report.environment)),
        "\n".join(f"* {line}" for line in settings),
        text.markdown_table(text.comparison_rows(report.modes)),
        "![chart](chart.png)",
        "\n".join(f"* {note}" for note in notes),
    ]
    if failures:
        parts.append("## Failures\n\n" + "\n".join(failures))
    return "\n\n".join(parts) + "\n"

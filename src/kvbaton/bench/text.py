"""Tables and bars for a terminal, and tables for a summary file.

Invariant: pure, and plain: the same text on a terminal and in a log, columns aligned by the longest cell.
Read `timeline` for what the bars show and `pictures` for the same as images.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbaton.bench.metrics import median_and_spread
from kvbaton.bench.records import ModeReport, RunFigures
from kvbaton.bench.timeline import Span, Timeline

_BAR_COLUMNS = 44
_EIGHTHS = " ▏▎▍▌▋▊▉"
_DECODE_MARGIN = 1.04
"""How far past the first token bars go; decoding may go on for seconds."""


def shown_until_ms(timeline: Timeline) -> float:
    """The end of the time axis: a little after the first token, or after everything where none is known."""
    if timeline.first_byte_ms is not None:
        return max(timeline.first_byte_ms * _DECODE_MARGIN, 1e-3)
    return max((span.end_ms for span in timeline.spans), default=0.0) or 1.0


def timeline_text(timeline: Timeline) -> str:
    """Aligned bars, one line per span, and what they add up to."""
    until_ms = shown_until_ms(timeline)
    lanes = max((len(span.lane) for span in timeline.spans), default=0)
    names = max((len(span.name) for span in timeline.spans), default=0)
    lines = [headline(timeline)]
    lines += [
        f"  {span.lane:<{lanes}}  {span.name:<{names}}  {bar(span, until_ms)}  {_figures(span)}".rstrip()
        for span in timeline.spans
    ]
    lines.append(f"  bars from 0 to {until_ms:,.0f} ms{'' if timeline.first_byte_ms is None else ', the first token'}")
    if timeline.missing:
        lines.append(f"  not in the traces: {', '.join(timeline.missing)}")
    return "\n".join(lines)


def headline(timeline: Timeline) -> str:
    """One line that says what one request's handoff cost."""
    parts = [timeline.direction or "direction unknown"]
    if timeline.num_prompt_tokens is not None:
        parts.append(f"{timeline.num_prompt_tokens} prompt tokens")
    if timeline.num_bytes:
        parts.append(f"{timeline.num_bytes / 1e6:.2f} MB of KV")
    if timeline.first_byte_ms is not None:
        parts.append(f"first token after {timeline.first_byte_ms:,.0f} ms")
    if timeline.exposed_handoff_ms is not None:
        parts.append(f"of which the handoff {timeline.exposed_handoff_ms:.1f} ms")
    return ", ".join(parts)


def bar(span: Span, until_ms: float, columns: int = _BAR_COLUMNS) -> str:
    """The span's place on an axis of `columns` characters; always visible, open at the right where it goes on."""
    scale = columns / until_ms
    start = min(max(span.start_ms, 0.0) * scale, columns - 1.0)
    end = min(max(span.end_ms * scale, start), float(columns))
    first = int(start)
    full, eighths = divmod(int((end - first) * 8), 8)
    drawn = "█" * full + (_EIGHTHS[eighths] if eighths else "")
    if span.end_ms > until_ms:
        drawn = drawn[:-1] + "▶"
    return (" " * first + (drawn or "▏")).ljust(columns)


def _figures(span: Span) -> str:
    text = f"{span.duration_ms:9,.1f} ms"
    return text if span.num_bytes is None else f"{text}  {span.num_bytes / 1e6:.2f} MB"


def table(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the head; the first two columns are words, the others figures."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if at < 2 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(rows[0]), rule, *(line(row) for row in rows[1:])])


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """The same for a summary file."""
    marks = ["---" if at < 2 else "---:" for at in range(len(rows[0]))]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in [rows[0], marks, *rows[1:]]
    )


def comparison_rows(modes: Sequence[ModeReport]) -> list[tuple[str, ...]]:
    """Head and one row per mode: median and spread over its runs, or why there is none."""
    head = ("mode", "cores", "TTFT mean, ms", "TTFT p99, ms", "TPOT mean, ms", "failed", "engines' CPU, s")
    return [head, *(_mode_row(mode) for mode in modes)]


def _mode_row(mode: ModeReport) -> tuple[str, ...]:
    figures = [run.figures for run in mode.runs if run.figures is not None]
    ttft = [each.ttft_ms for each in figures if each.ttft_ms]
    tpot = [each.tpot_ms for each in figures if each.tpot_ms]
    return (
        mode.title,
        mode.cores,
        _spread([each.mean for each in ttft], 0),
        _spread([each.p99 for each in ttft], 0),
        _spread([each.mean for each in tpot], 1),
        _failed(figures, len(mode.runs) - len(figures)),
        _spread([run.engine_cpu_s for run in mode.runs if run.engine_cpu_s is not None and run.figures], 1),
    )


def _spread(values: Sequence[float], digits: int) -> str:
    found = median_and_spread(values)
    if found is None:
        return "-"
    median, least, greatest = (f"{value:,.{digits}f}" for value in found)
    return median if len(values) == 1 else f"{median} ({least}-{greatest})"


def _failed(figures: Sequence[RunFigures], lost_runs: int) -> str:
    requests = sum(each.failed for each in figures)
    sent = requests + sum(each.completed for each in figures)
    parts = [f"{requests} of {sent}"] if figures else []
    if lost_runs:
        parts.append("the run" if lost_runs == 1 and not figures else f"{lost_runs} runs")
    return " + ".join(parts) or "-"

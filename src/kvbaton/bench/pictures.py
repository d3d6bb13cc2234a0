"""One request's timeline, and a comparison of modes, as PNG files.

Invariant: drawn without a display, in colours that colour-blind people tell apart (Okabe and Ito), sized to be read in a
README. matplotlib is loaded by the first drawing only: it is slow, and an extra. Read `text` for the same in a terminal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbaton.bench.metrics import median_and_spread
from kvbaton.bench.records import Distribution, ModeReport
from kvbaton.bench.text import headline, shown_until_ms
from kvbaton.bench.timeline import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LANE_COLOURS = {"router": "#999999", "prefill": "#0072B2", "decode": "#E69F00"}
_MOVING_COLOUR = "#009E73"
_EXPOSED_COLOUR = "#D55E00"
_INK = "#222222"
_DPI = 150


def check_installed() -> None:
    """ModuleNotFoundError when matplotlib is missing: before anything slow happens, not after."""
    import matplotlib as mpl  # noqa: F401, PLC0415


def draw_timeline(timeline: Timeline, title: str, path: Path) -> None:
    """The whole way to the first token above, the handoff magnified below."""
    whole_rows, window = _rows(timeline.spans), _handoff(timeline)
    inside = [span for span in timeline.spans if window and _overlaps(span, window) and span.lane != "router"]
    counts = [len(whole_rows)] + ([len(_rows(inside))] if window else [])
    figure = _new_figure(9.0, 1.1 + 0.75 * len(counts) + 0.3 * sum(counts))
    axes = figure.subplots(len(counts), 1, height_ratios=counts, squeeze=False)[:, 0]
    _spans(axes[0], whole_rows, (0.0, shown_until_ms(timeline)))
    axes[0].set_title(f"{title}\n{headline(timeline)}", fontsize=10, loc="left", x=0.0)
    if window is not None:
        _spans(axes[1], _rows(inside), window)
        axes[1].set_title("magnified: from the end of prefill to the first token", fontsize=10, loc="left")
    axes[-1].set_xlabel("milliseconds after the router received the request", fontsize=9)
    _legend(figure)
    _save(figure, path)


def draw_comparison(modes: Sequence[ModeReport], title: str, path: Path) -> None:
    """TTFT and TPOT of every mode side by side: the median over runs of the mean, and how far the runs spread."""
    figure = _new_figure(9.0, 1.7 + 0.5 * len(modes))
    left, right = figure.subplots(1, 2, sharey=True)
    _bars(left, modes, "ttft_ms", "time to first token (TTFT), ms")
    _bars(right, modes, "tpot_ms", "time per further token (TPOT), ms")
    left.set_yticks(range(len(modes)), [f"{mode.title}\n{_cores(mode)}" for mode in modes], fontsize=9)
    left.invert_yaxis()
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    _save(figure, path)


def _new_figure(width_inches: float, height_inches: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    # Not pyplot: it would choose a backend for the whole process, and keep the figure.
    figure = Figure(figsize=(width_inches, height_inches), layout="constrained", dpi=_DPI)
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside its place first: an interruption must not leave half an image.
    draft = path.with_name(f".{path.name}")
    figure.savefig(draft, format="png")
    draft.replace(path)


def _handoff(timeline: Timeline) -> tuple[float, float] | None:
    """From shortly before prefill's end until the first token; None where that is not known."""
    prefill = timeline.span("prefill")
    if prefill is None or timeline.first_byte_ms is None or timeline.first_byte_ms <= prefill.end_ms:
        return None
    margin_ms = (timeline.first_byte_ms - prefill.end_ms) * 0.15
    return prefill.end_ms - margin_ms, timeline.first_byte_ms + margin_ms


def _overlaps(span: Span, window: tuple[float, float]) -> bool:
    return span.end_ms >= window[0] and span.start_ms <= window[1]


def _is_segment(span: Span) -> bool:
    return span.num_bytes is not None


def _colour(span: Span) -> str:
    if _is_segment(span):
        return _MOVING_COLOUR
    return _EXPOSED_COLOUR if span.name == "exposed handoff" else _LANE_COLOURS[span.lane]


def _rows(spans: Sequence[Span]) -> dict[str, list[Span]]:
    """Spans by the row they are drawn in: all segments share one, as there may be many."""
    rows: dict[str, list[Span]] = {}
    for span in spans:
        name = "KV segments" if _is_segment(span) else span.name
        rows.setdefault(name if name.startswith(span.lane) else f"{span.lane}: {name}", []).append(span)
    return rows


def _spans(axes: Axes, rows: Mapping[str, Sequence[Span]], window: tuple[float, float]) -> None:
    start_ms, end_ms = window
    width_ms = end_ms - start_ms
    for row, spans in enumerate(rows.values()):
        left = max(min(span.start_ms for span in spans), start_ms)
        right = min(max(span.end_ms for span in spans), end_ms)
        for span in spans:
            span_left, span_right = max(span.start_ms, start_ms), min(span.end_ms, end_ms)
            # A sliver of the axis, so that what takes no time is still seen.
            shown_ms = max(span_right - span_left, width_ms * 0.003)
            axes.barh(row, shown_ms, left=span_left, height=0.62, color=_colour(span))
        text, gap_ms = _label(spans, window), width_ms * 0.012
        if right - start_ms < width_ms * 0.7:
            axes.text(right + gap_ms, row, text, ha="left", va="center", fontsize=8, color=_INK)
        elif left - start_ms > width_ms * 0.3:
            axes.text(left - gap_ms, row, text, ha="right", va="center", fontsize=8, color=_INK)
        elif len(spans) == 1:
            ink = _ink_on(_colour(spans[0]))
            axes.text((left + right) / 2, row, text, ha="center", va="center", fontsize=8, color=ink)
        else:  # over bars and gaps alike
            paper = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            axes.text((left + right) / 2, row, text, ha="center", va="center", fontsize=8, color=_INK, bbox=paper)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(start_ms, end_ms)
    _plain(axes)


def _label(spans: Sequence[Span], window: tuple[float, float]) -> str:
    duration_ms = sum(span.duration_ms for span in spans)
    text = f"{duration_ms:,.1f} ms" + (
        " in all" if spans[-1].end_ms > window[1] or spans[0].start_ms < window[0] else ""
    )
    if spans[0].num_bytes is None:
        return text
    num_bytes = sum(span.num_bytes or 0 for span in spans)
    return f"{len(spans)} x, " * (len(spans) > 1) + f"{num_bytes / 1e6:.2f} MB in {text}"


def _ink_on(colour: str) -> str:
    return _INK if colour in (_LANE_COLOURS["router"], _LANE_COLOURS["decode"]) else "white"


def _legend(figure: Figure) -> None:
    from matplotlib.patches import Patch  # noqa: PLC0415

    meanings = {
        "router": _LANE_COLOURS["router"],
        "prefill engine": _LANE_COLOURS["prefill"],
        "KV on its way": _MOVING_COLOUR,
        "handoff that prefill did not hide": _EXPOSED_COLOUR,
        "decode engine": _LANE_COLOURS["decode"],
    }
    handles = [Patch(color=colour, label=label) for label, colour in meanings.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)


def _bars(axes: Axes, modes: Sequence[ModeReport], metric: str, label: str) -> None:
    found = [_medians(mode, metric) for mode in modes]
    longest = max((each[2] for each in found if each), default=1.0)
    for row, (mode, each) in enumerate(zip(modes, found, strict=True)):
        if each is None:
            axes.text(longest * 0.02, row, "no result", va="center", fontsize=8, color=_INK, style="italic")
            continue
        median, least, greatest = each
        axes.barh(
            row,
            median,
            height=0.6,
            color=_mode_colour(mode),
            hatch="//" if mode.is_hand_edited else None,
            edgecolor="white",
        )
        if greatest > least:
            axes.errorbar(median, row, xerr=[[median - least], [greatest - median]], color=_INK, capsize=3, lw=1)
        axes.text(
            greatest + longest * 0.02, row, f"{median:,.{0 if metric == 'ttft_ms' else 1}f}", va="center", fontsize=8
        )
    axes.set_xlim(0, longest * 1.18)
    axes.set_xlabel(label, fontsize=9)
    _plain(axes)


def _medians(mode: ModeReport, metric: str) -> tuple[float, float, float] | None:
    values = []
    for run in mode.runs:
        found: Distribution | None = getattr(run.figures, metric) if run.figures else None
        if found is not None:
            values.append(found.mean)
    return median_and_spread(values)


def _mode_colour(mode: ModeReport) -> str:
    if mode.name.startswith("aggregated"):
        return _LANE_COLOURS["router"]
    return _LANE_COLOURS["prefill"] if mode.name.startswith("kvbaton") else _LANE_COLOURS["decode"]


def _cores(mode: ModeReport) -> str:
    if "GPU" in mode.cores:
        return mode.cores
    return f"{mode.cores} core" if mode.cores == "1" else f"{mode.cores} cores"


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#dddddd", lw=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", labelsize=8)
    axes.locator_params(axis="x", nbins=6)

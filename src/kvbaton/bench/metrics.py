"""Latency figures out of records, defined as `vllm bench serve` defines them.

Invariant: pure. Only requests that gave what was asked for are in a figure; the others are counted as failed. TTFT is
the time to the first token, TPOT the rest of the time per further token, ITL the gaps of the stream, E2EL the whole.
Read `records` for what goes in and comes out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from kvbaton.bench.records import Distribution, RequestRecord, RunFigures


def figures_of(records: Sequence[RequestRecord]) -> RunFigures:
    """One run in numbers."""
    good = [record for record in records if record.failure is None]
    return RunFigures(
        completed=len(good),
        failed=len(records) - len(good),
        ttft_ms=distribution([record.ttft_s * 1e3 for record in good if record.ttft_s is not None]),
        tpot_ms=distribution([tpot * 1e3 for record in good if (tpot := tpot_s(record)) is not None]),
        itl_ms=distribution([itl_s * 1e3 for record in good for itl_s in record.itls_s]),
        e2el_ms=distribution([record.latency_s * 1e3 for record in good]),
    )


def tpot_s(record: RequestRecord) -> float | None:
    """Time per output token after the first; None where there is no second one."""
    if record.ttft_s is None or record.output_tokens < 2:
        return None
    return (record.latency_s - record.ttft_s) / (record.output_tokens - 1)


def distribution(values: Sequence[float]) -> Distribution | None:
    """None of nothing. The deviation is that of the values themselves, not an estimate for more of them."""
    if not values:
        return None
    ordered = sorted(values)
    return Distribution(
        mean=statistics.fmean(ordered),
        median=statistics.median(ordered),
        std=statistics.pstdev(ordered),
        p50=percentile(ordered, 50),
        p90=percentile(ordered, 90),
        p99=percentile(ordered, 99),
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear between the two nearest of `ordered`, which is sorted and not empty; as numpy's default."""
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    # Written so that equal neighbours give exactly their value.
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median_and_spread(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Median, least and greatest of several runs' figures; None of nothing."""
    return (statistics.median(values), min(values), max(values)) if values else None

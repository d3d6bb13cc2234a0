"""Figures, held against numpy's, which `vllm bench serve` uses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.bench.metrics import distribution, figures_of, median_and_spread, percentile, tpot_s
from kvbaton.bench.records import RequestRecord

values = st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=50)


def record(ttft_s: float | None = 0.2, tokens: int = 3, error: str | None = None) -> RequestRecord:
    return RequestRecord(
        sent_s=0.0,
        ttft_s=ttft_s,
        itls_s=(0.1,) * (tokens - 1),
        latency_s=(ttft_s or 0.0) + 0.1 * (tokens - 1),
        input_tokens=10,
        output_tokens=tokens,
        expected_output_tokens=tokens,
        error=error,
    )


class TestDistribution:
    @given(values)
    def test_it_is_what_numpy_says(self, found: list[float]) -> None:
        made = distribution(found)
        assert made is not None
        assert made.mean == pytest.approx(np.mean(found), rel=1e-9, abs=1e-9)
        assert made.median == pytest.approx(np.median(found), rel=1e-9, abs=1e-9)
        assert made.std == pytest.approx(np.std(found), rel=1e-6, abs=1e-6)
        for percent in (50, 90, 99):
            assert getattr(made, f"p{percent}") == pytest.approx(np.percentile(found, percent), rel=1e-9, abs=1e-9)

    @given(values, st.floats(0, 100))
    def test_a_percentile_lies_among_the_values(self, found: list[float], percent: float) -> None:
        assert min(found) <= percentile(sorted(found), percent) <= max(found)

    def test_nothing_has_none(self) -> None:
        assert distribution([]) is None


class TestFigures:
    def test_failed_requests_are_counted_and_left_out(self) -> None:
        figures = figures_of([record(0.2), record(0.4), record(None, error="status 500"), record(9.0, error="cut")])
        assert (figures.completed, figures.failed) == (2, 2)
        assert figures.ttft_ms is not None
        assert figures.ttft_ms.mean == pytest.approx(300)
        assert figures.tpot_ms is not None
        assert figures.tpot_ms.mean == pytest.approx(100)
        assert figures.itl_ms is not None
        assert figures.itl_ms.p99 == pytest.approx(100)
        assert figures.e2el_ms is not None
        assert figures.e2el_ms.median == pytest.approx(500)

    def test_nothing_completed_has_no_figures(self) -> None:
        figures = figures_of([record(None)])
        assert figures.failed == 1
        assert figures.ttft_ms is figures.tpot_ms is figures.itl_ms is figures.e2el_ms is None

    def test_the_first_token_is_not_part_of_tpot(self) -> None:
        assert tpot_s(record(5.0, tokens=11)) == pytest.approx(0.1)
        assert tpot_s(record(5.0, tokens=1)) is None
        assert tpot_s(record(None)) is None


def test_median_and_spread() -> None:
    assert median_and_spread([]) is None
    assert median_and_spread([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)

"""Plans of requests: the same from the same generators, in order, within their limits."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.bench.pace import paced_workload
from kvbaton.bench.workload import PlannedRequest, Workload, plan_requests


def workload(**fields: float) -> Workload:
    values: dict[str, float] = {
        "num_requests": 5,
        "rate_per_s": 2.0,
        "min_input_tokens": 3,
        "max_input_tokens": 7,
        "output_tokens": 4,
    }
    return Workload(**(values | fields))  # type: ignore[arg-type]


def plan(load: Workload, arrivals: int = 1, prompts: int = 2) -> tuple[PlannedRequest, ...]:
    return plan_requests(load, random.Random(arrivals), random.Random(prompts), vocabulary_tokens=1000)


class TestPlanRequests:
    @given(
        st.integers(1, 20),
        st.floats(0.01, 100),
        st.integers(1, 50),
        st.integers(0, 50),
        st.integers(65, 5000),
        st.integers(0, 1 << 32),
    )
    def test_it_keeps_its_promises(
        self, count: int, rate: float, least: int, more: int, vocabulary: int, seed: int
    ) -> None:
        load = workload(
            num_requests=count, rate_per_s=rate, min_input_tokens=least, max_input_tokens=least + more, output_tokens=3
        )
        planned = plan_requests(load, random.Random(seed), random.Random(seed), vocabulary_tokens=vocabulary)
        assert len(planned) == count
        assert planned[0].due_s == 0.0
        assert [each.due_s for each in planned] == sorted(each.due_s for each in planned)
        for each in planned:
            assert least <= len(each.prompt_token_ids) <= least + more
            assert all(32 <= token < vocabulary - 32 for token in each.prompt_token_ids)
            assert each.output_tokens == 3

    def test_the_same_generators_give_the_same_plan(self) -> None:
        assert plan(workload()) == plan(workload())

    def test_fresh_prompts_keep_arrivals_and_lengths(self) -> None:
        one, other = plan(workload(), prompts=2), plan(workload(), prompts=3)
        assert [each.due_s for each in one] == [each.due_s for each in other]
        assert [len(each.prompt_token_ids) for each in one] == [len(each.prompt_token_ids) for each in other]
        assert all(a.prompt_token_ids[:3] != b.prompt_token_ids[:3] for a, b in zip(one, other, strict=True))

    def test_the_rate_is_kept_on_average(self) -> None:
        planned = plan(workload(num_requests=2000, rate_per_s=4.0))
        assert planned[-1].due_s == pytest.approx(2000 / 4.0, rel=0.1)

    def test_a_vocabulary_without_ordinary_tokens_is_refused(self) -> None:
        with pytest.raises(ValueError, match="vocabulary of 64 tokens"):
            plan_requests(workload(), random.Random(1), random.Random(1), vocabulary_tokens=64)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_requests": 0}, "0 requests"),
        ({"rate_per_s": 0.0}, "rate must be positive"),
        ({"rate_per_s": float("nan")}, "rate must be positive"),
        ({"min_input_tokens": 0}, "prompts of 0 to 7"),
        ({"max_input_tokens": 2}, "prompts of 3 to 2"),
        ({"output_tokens": 0}, "0 output tokens"),
    ],
)
def test_what_cannot_be_planned_is_refused(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        workload(**fields)


class TestPace:
    def paced(self, prefill_s: float) -> Workload:
        return paced_workload(
            prefill_s=prefill_s, watch_s=40.0, input_tokens=(500, 800), output_tokens=24, num_requests=(4, 10)
        )

    def test_the_prefill_engine_has_time_to_spare(self) -> None:
        load = self.paced(3.0)
        assert 0.5 < load.rate_per_s * 3.0 < 0.7
        assert load.num_requests == int(40 * load.rate_per_s)

    def test_a_slow_machine_still_gets_some_and_a_fast_one_not_too_many(self) -> None:
        assert self.paced(60.0).num_requests == 4
        assert self.paced(0.0) == self.paced(0.001)
        assert self.paced(0.0).num_requests == 10
        assert self.paced(0.0).rate_per_s == 4.0

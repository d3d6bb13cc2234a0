"""Many clients that leave at once, at every phase: both pools come back without waiting for a lease."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvbaton.bench.soak_judge import Verdict, judge
from kvbaton.types import Direction
from tests.engines.conftest import Pair, wait_until_empty
from tests.faults.asking import Expected, listen
from tests.faults.conftest import CROWDED, LONG_TOKENS, assert_twenty_succeed

pytestmark = [pytest.mark.engines, pytest.mark.faults, pytest.mark.timeout(900)]

NUM_CLIENTS = 32


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_storm_of_cancels_leaves_nothing(pair: Pair, right: Expected, seed: int, direction: Direction) -> None:
    wait_until_empty(pair, timeout_s=60)
    rng = random.Random(seed)
    cases = [(rng.choice(CROWDED), 10 ** rng.uniform(-3, 1), rng.choice([None, 1, 5, 40])) for _ in range(NUM_CLIENTS)]

    def leave(case: tuple[tuple[int, ...], float, int | None]) -> Verdict:
        prompt, patience_s, max_tokens = case
        heard = listen(
            pair.url(direction),
            prompt,
            LONG_TOKENS,
            is_streaming=True,
            patience_s=patience_s,
            max_tokens=max_tokens,
        )
        return judge(heard, right[prompt])

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        found = list(pool.map(leave, cases))
    assert set(found) <= {Verdict.LEFT, Verdict.RIGHT}, found
    assert found.count(Verdict.LEFT) > NUM_CLIENTS // 2, "hardly anybody left early"
    wait_until_empty(pair, timeout_s=25)
    assert_twenty_succeed(pair, right)

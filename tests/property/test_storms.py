"""Several engines, any schedule: what their schedulers may do, and every fault, in any order.

What must hold after each step, and at the end, is said by stage.py and ledger.py: no byte moves into or out of a block of
somebody else, what was delivered is what was computed, every request is reported once per rank, and nothing is left.
Schedules come from a seeded generator (storm.py); one that fails is named by its seed, and shown cut down.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from tests.property.storm import failure, generate, shortest

NUM_STORMS = int(os.environ.get("KVBATON_NUM_STORMS", "20000"))
STORMS_PER_TEST = 500


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, NUM_STORMS, STORMS_PER_TEST))
def test_any_schedule(first: int) -> None:
    """20,000 schedules; a longer run is `scripts/storm NUMBER`, one alone is `scripts/storm --seed SEED`."""
    for seed in range(first, min(first + STORMS_PER_TEST, NUM_STORMS)):
        schedule = generate(seed)
        error = failure(schedule)
        if error is not None:
            print(f"\nThe schedule of seed {seed} failed. Cut down:\n{shortest(schedule)}")  # noqa: T201
            raise error

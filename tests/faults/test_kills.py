"""kill -9 of either engine at a known point of a transfer: its request ends honestly, the restarted engine serves."""

from __future__ import annotations

import threading
import time

import pytest

from kvbaton.bench.soak_judge import Heard, Verdict, judge
from kvbaton.types import Direction
from tests.engines.conftest import Pair
from tests.faults.asking import Expected, listen
from tests.faults.conftest import LONG, LONG_TOKENS, assert_twenty_succeed, revive
from tests.faults.watching import Watch

pytestmark = [pytest.mark.engines, pytest.mark.faults, pytest.mark.timeout(900)]

POINTS = {
    "computing": ("prefill", "source_advanced"),
    "registering": ("decode", "registered"),
    "waiting for KV": ("prefill", "destination_known"),
    "between segments": ("prefill", "segment_moved"),
    "decoding": ("decode", "decode_started"),
}
"""Who says in its timeline that the point is reached, and how."""
CASES = [
    *[(Direction.PUSH, victim, point) for point in list(POINTS)[1:] for victim in ("prefill", "decode")],
    # A pull registers when the prompt is computed, and is over some milliseconds later.
    (Direction.PULL, "prefill", "computing"),
    (Direction.PULL, "decode", "registering"),
]


@pytest.mark.parametrize(("direction", "victim", "point"), CASES, ids=lambda each: str(getattr(each, "value", each)))
def test_killed_engine_fails_its_request_honestly_and_comes_back(
    pair: Pair, right: Expected, direction: Direction, victim: str, point: str
) -> None:
    prompt = LONG[CASES.index((direction, victim, point))]
    teller, event = POINTS[point]
    instances = {"prefill": pair.prefill, "decode": pair.decode}
    watch = Watch(instances[teller])
    heard: list[Heard] = []
    asking = threading.Thread(
        target=lambda: heard.append(listen(pair.url(direction), prompt, LONG_TOKENS, is_streaming=True))
    )
    asking.start()
    watch.wait_for(event)
    killed_s = time.monotonic()
    pair.deployment.kill(instances[victim])
    asking.join()
    ended_after_s = time.monotonic() - killed_s

    verdict = judge(heard[0], right[prompt])
    if (victim, point) == ("prefill", "decoding"):
        assert verdict is Verdict.RIGHT, "a prefill engine that has delivered is not needed any more"
    else:
        assert verdict is Verdict.FAILED, heard[0]
        assert ended_after_s < 30
    revive(pair, instances[victim])
    assert_twenty_succeed(pair, right)

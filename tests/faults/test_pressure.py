"""Block pools so small that prompts queue for blocks on P, and decoding requests are preempted on D."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvbaton.types import Direction
from tests.engines.asking import metric
from tests.engines.conftest import Pair, wait_until_empty
from tests.faults.asking import Expected, assert_all_right, verdicts
from tests.faults.conftest import CROWDED, LONG_TOKENS, start_pair

pytestmark = [pytest.mark.engines, pytest.mark.faults, pytest.mark.timeout(900)]

NUM_BLOCKS = 48
"""Of P: 1,536 tokens, two or three prompts of `CROWDED`."""
NUM_DECODE_BLOCKS = 36
"""1,152 tokens: two of these prompts, but not their answers too."""


@pytest.fixture(scope="module")
def small_pair(right: Expected, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with start_pair(
        "pressure",
        tmp_path_factory.mktemp("faults"),
        max_model_len=1024,
        max_num_batched_tokens=128,
        prefill_args=("--num-gpu-blocks-override", str(NUM_BLOCKS)),
        decode_args=("--num-gpu-blocks-override", str(NUM_DECODE_BLOCKS)),
    ) as started:
        yield started


@pytest.mark.parametrize("direction", list(Direction))
def test_tokens_are_right_under_preemption_and_admission_pressure(
    small_pair: Pair, right: Expected, direction: Direction
) -> None:
    preempted = metric(small_pair.decode.url, "vllm:num_preemptions_total")
    found = verdicts([small_pair.url(direction)], CROWDED, right, LONG_TOKENS, num_at_once=len(CROWDED))
    assert_all_right(found)
    assert metric(small_pair.decode.url, "vllm:num_preemptions_total") > preempted, "the pool was not small enough"
    wait_until_empty(small_pair, timeout_s=60)

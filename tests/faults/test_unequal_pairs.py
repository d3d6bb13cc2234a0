"""P and D that differ in block size or in tensor-parallel size: the tokens are those of one engine like D."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbaton.launch.spec import Connector
from kvbaton.launch.supervisor import Deployment
from kvbaton.types import Direction
from tests.engines.conftest import Pair, make_spec, wait_until_empty
from tests.engines.prompts import Prompt
from tests.faults.asking import Expected, assert_all_right, verdicts
from tests.faults.conftest import NUM_TOKENS, _prompts, answers_of, start_pair

pytestmark = [
    pytest.mark.engines,
    pytest.mark.faults,
    pytest.mark.timeout(900),
]

PROMPTS: list[Prompt] = [
    *_prompts(4, [1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 511, 512, 513, 900, 1500]),
]
CONTINUED: list[Prompt] = [
    (*prompt, *range(10, 10 + extra)) for prompt, extra in zip(PROMPTS[8:], range(1, 90, 8), strict=False)
]
"""Both sides hold a prefix of these when they are asked: of whole blocks of one side, and not of the other's."""


def assert_parity(pair: Pair, expected: Expected) -> None:
    urls = [pair.url(direction) for direction in Direction]
    for prompts in (PROMPTS, CONTINUED):
        assert_all_right(verdicts(urls, prompts, expected, NUM_TOKENS, num_at_once=4))
    wait_until_empty(pair, timeout_s=60)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Expected]:
    """By D's tensor-parallel size, which changes how sums are rounded."""
    found: dict[int, Expected] = {}
    for tp in (1, 2):
        spec = make_spec(f"like-d-{tp}", tmp_path_factory.mktemp("faults"), connector=Connector.NONE, tp=tp)
        with Deployment(spec) as deployment:
            found[tp] = answers_of(deployment.router_url, dict.fromkeys([*PROMPTS, *CONTINUED], NUM_TOKENS))
    return found


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(32, 64), (64, 32), (32, 128), (128, 32), (128, 64)])
def test_block_sizes(expected: dict[int, Expected], tmp_path: Path, prefill_size: int, decode_size: int) -> None:
    sizes = {
        "prefill_args": ("--block-size", str(prefill_size)),
        "decode_args": ("--block-size", str(decode_size)),
    }
    for pair in start_pair("blocks", tmp_path, **sizes):
        assert_parity(pair, expected[1])


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (2, 1), (2, 2)])
def test_tensor_parallel_sizes(expected: dict[int, Expected], tmp_path: Path, prefill_tp: int, decode_tp: int) -> None:
    # Both engines share the two cores; ranks of one engine need a core each.
    for pair in start_pair("ranks", tmp_path, prefill_tp=prefill_tp, decode_tp=decode_tp, pin=False):
        assert_parity(pair, expected[decode_tp])

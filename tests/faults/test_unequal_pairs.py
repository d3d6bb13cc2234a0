"""P and D that differ in block size or in tensor-parallel size: the tokens are those of one engine like D."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbaton.launch.spec import Connector
from kvbaton.launch.supervisor import Deployment
from kvbaton.types import Direction
from tests.engines.conftest import Pair, make_spec, wait_until_empty
from tests.engines.prompts import Prompt
from tests.faults.asking import Expected, assert_all_right, verdicts
from tests.faults.conftest import NUM_TOKENS, answers_of, fresh_prompts, start_pair

pytestmark = [
    pytest.mark.engines,
    pytest.mark.faults,
    pytest.mark.timeout(900),
]

PROMPTS: list[Prompt] = [
    *fresh_prompts(4, [1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 511, 512, 513, 900, 1500]),
]
CONTINUED: list[Prompt] = [
    (*prompt, *range(10, 10 + extra)) for prompt, extra in zip(PROMPTS[8:], range(1, 90, 8), strict=False)
]
"""Both sides hold a prefix of these when they are asked: of whole blocks of one side, and not of the other's."""


FEW = [prompt for prompt in PROMPTS if len(prompt) in {1, 32, 65, 257, 900}]
"""For ranks that share the cores, and spin while they wait for each other: a token takes them 10 times as long."""
FEW_CONTINUED = [prompt for prompt in CONTINUED if prompt[:257] in FEW or prompt[:900] in FEW]
FEW_TOKENS = 8


def assert_parity(pair: Pair, expected: Expected, rounds: list[list[Prompt]], num_tokens: int) -> None:
    urls = [pair.url(direction) for direction in Direction]
    for prompts in rounds:
        assert_all_right(verdicts(urls, prompts, expected, num_tokens, num_at_once=4))
    wait_until_empty(pair, timeout_s=60)


@pytest.fixture(scope="module")
def expected_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Expected]:
    """What one engine answers, by D's tensor-parallel size, which changes how sums are rounded. Asked once for each."""

    @functools.cache
    def ask(tp: int) -> Expected:
        spec = make_spec(f"like-d-{tp}", tmp_path_factory.mktemp("faults"), connector=Connector.NONE, tp=tp)
        wanted = dict.fromkeys([*PROMPTS, *CONTINUED], NUM_TOKENS)
        if tp > 1:
            wanted = dict.fromkeys([*FEW, *FEW_CONTINUED], FEW_TOKENS)
        with Deployment(spec) as deployment:
            return answers_of(deployment.router_url, wanted)

    return ask


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(32, 64), (64, 32), (32, 128), (128, 32), (128, 64)])
def test_block_sizes(
    expected_of: Callable[[int], Expected], tmp_path: Path, prefill_size: int, decode_size: int
) -> None:
    sizes = {
        "prefill_args": ("--block-size", str(prefill_size)),
        "decode_args": ("--block-size", str(decode_size)),
    }
    right = expected_of(1)  # before the pair starts: three engines are too many for the cores
    with start_pair("blocks", tmp_path, **sizes) as pair:
        assert_parity(pair, right, [PROMPTS, CONTINUED], NUM_TOKENS)


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (2, 1), (2, 2)])
def test_tensor_parallel_sizes(
    expected_of: Callable[[int], Expected], tmp_path: Path, prefill_tp: int, decode_tp: int
) -> None:
    right = expected_of(decode_tp)
    # Both engines share the two cores; ranks of one engine need a core each.
    with start_pair("ranks", tmp_path, prefill_tp=prefill_tp, decode_tp=decode_tp, pin=False) as pair:
        assert_parity(pair, right, [FEW, FEW_CONTINUED], FEW_TOKENS)

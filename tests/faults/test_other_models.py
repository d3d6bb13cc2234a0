"""Caches that are not one group of full attention, and a prefill engine in stages: the tokens of one engine alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbaton.launch.spec import Connector
from kvbaton.launch.supervisor import Deployment
from kvbaton.types import Direction
from tests.engines.conftest import make_spec, wait_until_empty
from tests.engines.prompts import Prompt
from tests.faults.asking import Expected, assert_all_right, verdicts
from tests.faults.conftest import answers_of, fresh_prompts, start_pair
from tests.faults.odd_models import CONFIGS, WINDOW_TOKENS, make_model

pytestmark = [pytest.mark.engines, pytest.mark.faults, pytest.mark.timeout(900)]

NUM_TOKENS = 16
LENGTHS = [
    1,
    2,
    15,
    16,
    17,
    32,
    33,
    WINDOW_TOKENS - 1,
    WINDOW_TOKENS,
    WINDOW_TOKENS + 1,
    128,
    161,
    300,
    511,
    513,
    700,
    1100,
]
PROMPTS: list[Prompt] = fresh_prompts(5, LENGTHS)
CONTINUED: list[Prompt] = [
    (*prompt, *range(10, 10 + extra)) for prompt, extra in zip(PROMPTS[6:], range(1, 90, 8), strict=False)
]
"""Both sides hold a prefix of these when they are asked."""


def answers_of_one_engine(tmp: Path, **changes: object) -> Expected:
    with Deployment(make_spec("alone", tmp, connector=Connector.NONE, **changes)) as deployment:
        return answers_of(deployment.router_url, dict.fromkeys([*PROMPTS, *CONTINUED], NUM_TOKENS))


def assert_parity(tmp: Path, right: Expected, **changes: object) -> None:
    with start_pair("pair", tmp, **changes) as pair:
        urls = [pair.url(direction) for direction in Direction]
        for prompts in (PROMPTS, CONTINUED):
            assert_all_right(verdicts(urls, prompts, right, NUM_TOKENS, num_at_once=4))
        wait_until_empty(pair, timeout_s=60)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_of_another_kind(tmp_path: Path, name: str) -> None:
    model = str(make_model(name, tmp_path / name))
    right = answers_of_one_engine(tmp_path, model=model)
    assert len(set(right.values())) > len(right) // 2  # the prompt matters
    assert_parity(tmp_path, right, model=model)


def test_a_prefill_engine_of_two_pipeline_stages(tmp_path: Path) -> None:
    right = answers_of_one_engine(tmp_path)
    assert_parity(tmp_path, right, prefill_pp=2, pin=False)

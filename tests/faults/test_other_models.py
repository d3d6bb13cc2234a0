"""Caches that are not one group of full attention."""

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
from tests.faults.odd_models import WINDOW_TOKENS, make_model

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


def assert_parity(tmp: Path, right: Expected, rounds: list[list[Prompt]], **changes: object) -> None:
    with start_pair("pair", tmp, **changes) as pair:
        urls = [pair.url(direction) for direction in Direction]
        for prompts in rounds:
            assert_all_right(verdicts(urls, prompts, right, NUM_TOKENS, num_at_once=4))
        wait_until_empty(pair, timeout_s=60)


def test_sliding_windows(tmp_path: Path) -> None:
    """Several cache groups, some of which give up blocks while the prompt is still being computed."""
    model = str(make_model("windowed", tmp_path / "windowed"))
    right = answers_of_one_engine(tmp_path, model=model)
    assert len(set(right.values())) > len(right) // 2  # the prompt matters
    assert_parity(tmp_path, right, [PROMPTS, CONTINUED], model=model)


def test_latent_attention(tmp_path: Path) -> None:
    """The tokens that vLLM's own pull connector gives. One engine alone is no measure here: vLLM's CPU kernels for this
    attention give other tokens when the last token of a prompt is computed with the answer, as decode engines do, and when
    several answers are computed at once.
    """
    model = str(make_model("latent", tmp_path / "latent"))

    def answers(url: str) -> Expected:
        return answers_of(url, dict.fromkeys(PROMPTS[1:-3], NUM_TOKENS), 1)

    with start_pair("pair", tmp_path, model=model) as pair:
        ours = [answers(pair.url(direction)) for direction in Direction]
        wait_until_empty(pair, timeout_s=60)
    with Deployment(make_spec("in-tree", tmp_path, connector=Connector.NIXL_PULL, model=model)) as deployment:
        theirs = answers(deployment.router_url)
    assert ours == [theirs, theirs]
    assert len(set(theirs.values())) > len(theirs) // 2  # the prompt matters

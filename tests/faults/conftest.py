"""One pair for many faults: engines that a test kills are started again on the same port, not replaced by a new pair."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvbaton.launch.spec import Connector
from kvbaton.launch.supervisor import Deployment, Instance
from kvbaton.types import Direction
from tests.engines.conftest import Pair, make_spec, wait_until_empty
from tests.engines.prompts import Prompt
from tests.engines.routing import second_router, wait_healthy
from tests.faults.asking import Expected, assert_all_right, listen, verdicts

NUM_TOKENS = 48
LONG_TOKENS = 200
"""Of an answer that is still coming when something happens."""


def fresh_prompts(seed: int, lengths: list[int]) -> list[Prompt]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(3, 256) for _ in range(length)) for length in lengths]


SHORT = fresh_prompts(1, [1, 20, 31, 32, 33, 64, 95, 100, 150, 200])
"""Ten: asked in both directions they are the 20 requests that must succeed after every fault."""
LONG = fresh_prompts(
    2, [3500, 3501, 3502, 3503, 3504, 3505, 3506, 3507, 3508, 3509, 3510, 3511, 3512, 3513, 3514, 3515]
)
"""Eight chunks each, seconds of prefill; one for each test, so that no test finds another's KV in a cache."""
CROWDED = fresh_prompts(3, [500, 430, 610, 380, 550, 480, 590, 400, 520, 450, 570, 350])
"""Together several times what the tiny pools hold."""


def answers_of(url: str, wanted: dict[Prompt, int], num_at_once: int = 4) -> Expected:
    """What the server at `url` answers, all tokens asked for."""

    def one(prompt: Prompt) -> tuple[int, ...]:
        heard = listen(url, prompt, wanted[prompt], deadline_s=300)
        assert len(heard.tokens) == wanted[prompt], heard
        return heard.tokens

    with ThreadPoolExecutor(num_at_once) as pool:
        return dict(zip(wanted, pool.map(one, wanted), strict=True))


@pytest.fixture(scope="session")
def right(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """One engine alone, every prompt of these tests."""
    spec = make_spec("right", tmp_path_factory.mktemp("faults"), connector=Connector.NONE)
    wanted = dict.fromkeys(SHORT, NUM_TOKENS) | dict.fromkeys([*LONG, *CROWDED], LONG_TOKENS)
    with Deployment(spec) as deployment:
        return answers_of(deployment.router_url, wanted)


@contextlib.contextmanager
def start_pair(name: str, tmp: Path, **changes: object) -> Iterator[Pair]:
    spec = make_spec(name, tmp, connector=Connector.BATON, **changes)
    with Deployment(spec) as deployment, second_router(deployment, Direction.PULL) as pull_url:
        yield Pair(deployment, deployment.router_url, pull_url)


@pytest.fixture(scope="session")
def pair(right: Expected, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Depends on `right`, so that the two never compete for the cores."""
    with start_pair("faults", tmp_path_factory.mktemp("faults")) as started:
        yield started


@pytest.fixture(autouse=True)
def everybody_lives(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that fails half way leaves no dead engine to the next one."""
    yield
    if "pair" in request.fixturenames:
        shared: Pair = request.getfixturevalue("pair")
        for instance in (shared.prefill, shared.decode):
            if instance.exit_code is not None:
                revive(shared, instance)


def revive(pair: Pair, victim: Instance) -> None:
    """It serves again on its port, and both routers have found that out by themselves."""
    pair.deployment.start(victim)
    wait_healthy(victim.url, timeout_s=240)
    for direction in Direction:
        wait_healthy(pair.url(direction), timeout_s=30)


def assert_twenty_succeed(pair: Pair, right: Expected) -> None:
    """And nothing is left of anything that went before."""
    urls = [pair.url(direction) for direction in Direction]
    assert_all_right(verdicts(urls, SHORT, right, NUM_TOKENS, num_at_once=4))
    wait_until_empty(pair, timeout_s=60)

"""Real vLLM engines, started once per session and shared: an aggregated one for the expected answers, then a P/D pair.

float32, because two correct ways of computing the same prompt differ by rounding, and in bfloat16 that now and then
turns a near-tie between two tokens. With float32 every token must be equal, and a wrong KV byte still changes it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvbaton.launch.models import resolve_model
from kvbaton.launch.spec import Connector, DeploymentSpec
from kvbaton.launch.supervisor import Deployment, Instance
from kvbaton.types import Direction
from tests.engines.asking import Answer, ask_all, metric
from tests.engines.prompts import PROMPTS, Prompt
from tests.engines.routing import second_router

MAX_BATCHED_TOKENS = 512
"""Small, so that prompts of more than one chunk are cheap."""


def make_spec(name: str, tmp: Path, **changes: object) -> DeploymentSpec:
    settings: dict[str, object] = {
        "model": resolve_model("tiny"),
        "served_model_name": "tiny",
        "name": name,
        "run_dir": str(tmp / name),
        "dtype": "float32",
        "max_model_len": 4608,
        "max_num_batched_tokens": MAX_BATCHED_TOKENS,
        "direction": Direction.PUSH,
        **changes,
    }
    return DeploymentSpec(**settings)  # type: ignore[arg-type]  # the keys above are the spec's own


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[Prompt, Answer]:
    """What one engine answers that computes everything itself."""
    spec = make_spec("aggregated", tmp_path_factory.mktemp("engines"), connector=Connector.NONE)
    with Deployment(spec) as deployment:
        return ask_all(deployment.router_url, PROMPTS, num_at_once=4)


@dataclass(frozen=True)
class Pair:
    """One running P/D pair with a router for each direction."""

    deployment: Deployment
    push_url: str
    pull_url: str

    @property
    def prefill(self) -> Instance:
        return self.deployment.by_role("prefill")[0]

    @property
    def decode(self) -> Instance:
        return self.deployment.by_role("decode")[0]

    def url(self, direction: Direction) -> str:
        return self.push_url if direction is Direction.PUSH else self.pull_url


def wait_until_empty(pair: Pair, *, timeout_s: float) -> None:
    """Both block pools are back to where they started."""
    deadline_s = time.monotonic() + timeout_s
    for instance in (pair.prefill, pair.decode):
        while metric(instance.url, "vllm:kv_cache_usage_perc") > 0:
            assert time.monotonic() < deadline_s, f"{instance.name} still holds blocks after {timeout_s} s"
            time.sleep(0.2)


@pytest.fixture(scope="session")
def pair(expected: dict[Prompt, Answer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Depends on `expected`, so that the two never compete for the cores."""
    spec = make_spec("pair", tmp_path_factory.mktemp("engines"), connector=Connector.BATON)
    with Deployment(spec) as deployment, second_router(deployment, Direction.PULL) as pull_url:
        yield Pair(deployment, deployment.router_url, pull_url)

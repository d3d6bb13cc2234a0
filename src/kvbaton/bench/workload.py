"""What is sent and when: arrivals and prompts out of seeded generators.

Invariant: pure. The same generators give the same plan, so two deployments can be asked the same; arrivals and prompts
have a generator each, so that one deployment can be asked at the same moments for prompts it has never seen.
Read `records` for what became of each request.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

_FIRST_ORDINARY_TOKEN = 32
"""Below it, and in as many at the end, vocabularies keep their special tokens."""


class Generator(Protocol):
    """The part of `random.Random` that is used here."""

    def expovariate(self, lambd: float, /) -> float: ...
    def randint(self, a: int, b: int, /) -> int: ...


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Poisson arrivals of prompts with lengths spread evenly. Raises ValueError for one that cannot be planned."""

    num_requests: int
    rate_per_s: float
    min_input_tokens: int
    max_input_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        if self.num_requests < 1:
            raise ValueError(f"{self.num_requests} requests; at least one is needed")
        if not self.rate_per_s > 0:
            raise ValueError(f"{self.rate_per_s} requests per second; the rate must be positive")
        if not 1 <= self.min_input_tokens <= self.max_input_tokens:
            raise ValueError(f"prompts of {self.min_input_tokens} to {self.max_input_tokens} tokens")
        if self.output_tokens < 1:
            raise ValueError(f"{self.output_tokens} output tokens; at least one is needed")


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request; `due_s` counts from the start of the run."""

    due_s: float
    prompt_token_ids: tuple[int, ...]
    output_tokens: int


def plan_requests(
    workload: Workload, arrivals: Generator, prompts: Generator, *, vocabulary_tokens: int
) -> tuple[PlannedRequest, ...]:
    """All requests in the order they are due, the first at 0.

    Lengths come from `arrivals`: they belong to the shape of the load and stay the same when prompts change.
    Raises ValueError for a vocabulary that leaves no ordinary tokens.
    """
    last_token = vocabulary_tokens - _FIRST_ORDINARY_TOKEN - 1
    if last_token < _FIRST_ORDINARY_TOKEN:
        raise ValueError(f"a vocabulary of {vocabulary_tokens} tokens is too small for random prompts")
    planned = []
    due_s = 0.0
    for index in range(workload.num_requests):
        due_s += arrivals.expovariate(workload.rate_per_s) if index else 0.0
        num_tokens = arrivals.randint(workload.min_input_tokens, workload.max_input_tokens)
        prompt = tuple(prompts.randint(_FIRST_ORDINARY_TOKEN, last_token) for _ in range(num_tokens))
        planned.append(PlannedRequest(due_s=due_s, prompt_token_ids=prompt, output_tokens=workload.output_tokens))
    return tuple(planned)

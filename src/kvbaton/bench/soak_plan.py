"""What a soak sends, and when its engines are killed: all of it out of one seed.

Invariant: pure. The same generator gives the same plan, so two connectors can be put through the same; the plan says
nothing of the clock but how long an impatient client waits. Read `soak_judge` for what an answer is worth.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol, TypeVar

import msgspec

from kvbaton.types import Direction

Item = TypeVar("Item")

FIRST_TOKEN, LAST_TOKEN = 3, 255
"""Ordinary tokens of every vocabulary, the tiny model's included."""
_LENGTHS: tuple[tuple[float, int, int], ...] = ((0.3, 1, 31), (0.5, 32, 192), (0.17, 193, 768), (0.03, 769, 2500))
"""Share, least and most tokens: less than a block, some blocks, about a chunk, several chunks."""
_OUTPUT_TOKENS = (1, 2, 8, 16, 16, 24, 48)
_REPEATED, _CONTINUED = 0.15, 0.2
_RECENT = 40
"""How many of the latest prompts are continued or sent again: those that may still be in a prefix cache."""
_PATIENCE_S = (0.002, 3.0)


class Generator(Protocol):
    """The part of `random.Random` that is used here."""

    def random(self) -> float: ...
    def randint(self, a: int, b: int, /) -> int: ...
    def choice(self, seq: Sequence[Item], /) -> Item: ...


class Leave(enum.Enum):
    """When a client goes away."""

    NEVER = "never"
    AFTER_A_WHILE = "after a while"
    AFTER_TOKENS = "after tokens"


class SoakRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One client: what it asks for and how long it stays."""

    prompt: int
    """Which of the plan's prompts."""
    output_tokens: int
    is_streaming: bool
    direction: Direction
    leave: Leave = Leave.NEVER
    patience_s: float | None = None
    patience_tokens: int | None = None


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """SIGKILL for the engine of `role` when so many requests have ended."""

    role: str
    after_requests: int


class SoakPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. `max_output_tokens` says for each prompt how many tokens of its answer must be known."""

    prompts: tuple[tuple[int, ...], ...]
    max_output_tokens: tuple[int, ...]
    requests: tuple[SoakRequest, ...]
    kills: tuple[Kill, ...]


def plan_soak(
    rng: Generator, *, num_requests: int, leaving_share: float, kills_per_engine: int, directions: Sequence[Direction]
) -> SoakPlan:
    """A soak of `num_requests`; P and D are killed in turn, evenly spread, a little off the even places.

    Only the requests' directions depend on `directions`: every connector is sent the same prompts.
    """
    prompts: list[tuple[int, ...]] = []
    requests: list[SoakRequest] = []
    for _ in range(num_requests):
        number = _next_prompt(rng, prompts)
        requests.append(_request(rng, number, leaving_share, directions))
    longest = [0] * len(prompts)
    for request in requests:
        longest[request.prompt] = max(longest[request.prompt], request.output_tokens)
    return SoakPlan(
        prompts=tuple(prompts),
        max_output_tokens=tuple(longest),
        requests=tuple(requests),
        kills=plan_kills(rng, num_requests=num_requests, kills_per_engine=kills_per_engine),
    )


def plan_kills(rng: Generator, *, num_requests: int, kills_per_engine: int) -> tuple[Kill, ...]:
    """Alternating, none before the first request has ended nor after the last."""
    num_kills = 2 * kills_per_engine
    places = [(turn + 0.7 + 0.6 * rng.random()) / (num_kills + 1) for turn in range(num_kills)]
    return tuple(
        Kill(role=("prefill", "decode")[turn % 2], after_requests=max(1, int(place * num_requests)))
        for turn, place in enumerate(places)
    )


def _next_prompt(rng: Generator, prompts: list[tuple[int, ...]]) -> int:
    """The number of the prompt that is sent next; `prompts` has it."""
    kind = rng.random()
    recent = range(max(0, len(prompts) - _RECENT), len(prompts))
    if recent and kind < _REPEATED:
        return rng.choice(recent)
    base: tuple[int, ...] = ()
    if recent and kind < _REPEATED + _CONTINUED:
        base = prompts[rng.choice(recent)]
    prompts.append((*base, *_tokens(rng, _length(rng)))[: _LENGTHS[-1][2]])
    return len(prompts) - 1


def _request(rng: Generator, number: int, leaving_share: float, directions: Sequence[Direction]) -> SoakRequest:
    request = SoakRequest(
        prompt=number,
        output_tokens=rng.choice(_OUTPUT_TOKENS),
        is_streaming=rng.random() < 0.5,
        direction=directions[int(rng.random() * len(directions))],
    )
    if rng.random() >= leaving_share:
        return request
    if request.is_streaming and rng.random() < 0.4:
        # Of many tokens, or it would have its whole answer before it leaves.
        return msgspec.structs.replace(
            request, leave=Leave.AFTER_TOKENS, output_tokens=48, patience_tokens=rng.randint(1, 16)
        )
    least_s, most_s = _PATIENCE_S
    # Evenly in the logarithm: as many leave within the first milliseconds as in the last second.
    return msgspec.structs.replace(
        request, leave=Leave.AFTER_A_WHILE, patience_s=least_s * (most_s / least_s) ** rng.random()
    )


def _length(rng: Generator) -> int:
    kind = rng.random()
    for share, least, most in _LENGTHS:
        if kind < share:
            return rng.randint(least, most)
        kind -= share
    return _LENGTHS[-1][2]


def _tokens(rng: Generator, count: int) -> tuple[int, ...]:
    return tuple(rng.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(count))

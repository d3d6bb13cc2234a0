"""PURE. Which P and which D serve a request, from a frozen snapshot.

Invariant: the same snapshot and turns give the same choice; nothing here counts, waits or asks. The shell (`pool.py`)
counts an instance's load until the stream it carries has ended, so a long answer weighs as long as it lasts. Read
next: `pool.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec


class Policy(enum.Enum):
    """How to choose among instances that would do."""

    ROUND_ROBIN = "round-robin"
    LEAST_IN_FLIGHT = "least-in-flight"


class Readiness(enum.Enum):
    """What is known of an instance."""

    READY = "ready"
    LEARNING = "learning"
    """It answered before, or was never asked; a probe is finding out. A P's KV identity may be unknown."""
    DOWN = "down"


class InstanceView(msgspec.Struct, frozen=True):
    url: str
    readiness: Readiness
    in_flight: int
    models: frozenset[str]


class Snapshot(msgspec.Struct, frozen=True):
    """The pool at one moment. `turn`s count the choices made so far, per side."""

    prefills: tuple[InstanceView, ...]
    decodes: tuple[InstanceView, ...]
    prefill_turn: int = 0
    decode_turn: int = 0


class Pair(msgspec.Struct, frozen=True):
    """URLs. `prefill` None: D serves the request alone."""

    prefill: str | None
    decode: str


class Unavailable(msgspec.Struct, frozen=True):
    """No pair; `reason` is for the user."""

    reason: str


def choose(policy: Policy, snapshot: Snapshot, model: str, *, wants_prefill: bool) -> Pair | Unavailable:
    """A pair whose instances all serve `model`.

    D must be ready. P may still be learning when no ready one is left: the request then waits for its probe.
    """
    decode = _pick(policy, _able(snapshot.decodes, model, Readiness.READY), snapshot.decode_turn)
    if decode is None:
        return Unavailable(_why("decode", snapshot.decodes, model))
    if not wants_prefill:
        return Pair(prefill=None, decode=decode.url)
    prefill = _pick(policy, _able(snapshot.prefills, model, Readiness.READY), snapshot.prefill_turn)
    if prefill is None:
        prefill = _pick(policy, _able(snapshot.prefills, model, Readiness.LEARNING), snapshot.prefill_turn)
    if prefill is None:
        return Unavailable(_why("prefill", snapshot.prefills, model))
    return Pair(prefill=prefill.url, decode=decode.url)


def known_models(snapshot: Snapshot) -> tuple[str, ...]:
    """Every model name some engine has reported, sorted."""
    return tuple(sorted({name for view in (*snapshot.prefills, *snapshot.decodes) for name in view.models}))


def _able(views: Iterable[InstanceView], model: str, readiness: Readiness) -> list[InstanceView]:
    return [view for view in views if view.readiness is readiness and model in view.models]


def _pick(policy: Policy, able: list[InstanceView], turn: int) -> InstanceView | None:
    if not able:
        return None
    start = turn % len(able)
    if policy is Policy.ROUND_ROBIN:
        return able[start]
    # Ties go round too, or an idle fleet would send everything to its first instance.
    return min(able[start:] + able[:start], key=lambda view: view.in_flight)


def _why(side: str, views: tuple[InstanceView, ...], model: str) -> str:
    ready = [view.url for view in views if view.readiness is Readiness.READY]
    if ready:
        return f"no ready {side} instance serves {model!r} (ready: {', '.join(ready)})"
    states = ", ".join(f"{view.url} is {view.readiness.value}" for view in views)
    return f"no {side} instance is ready ({states})" if states else f"there is no {side} instance"

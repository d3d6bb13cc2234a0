"""The life of one transfer at one end, as a table. Push and pull share it; it does not know which end it stands for.

What matters is only who moves the bytes. That side is POSTING; the other has OFFERED its blocks and must not reuse them
until the poster has said it will not touch them again, or has been fenced. Everything that affects the state is in this
file; `runtime` carries the effects out.

Invariant: blocks are given back (REPORT) exactly once, on entering CLOSED, and CLOSED absorbs every late input.
Next: segments.py (what to post), receipt.py (what has arrived).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvbaton.types import Outcome


class State(enum.Enum):
    OPEN = "open"
    """Our end exists; nothing of ours can be touched yet."""
    POSTING = "posting"
    """Both ends are known and we move the bytes."""
    OFFERED = "offered"
    """The peer may touch our blocks at any time."""
    DRAINING = "draining"
    """The outcome is decided, but bytes may still be moving."""
    CLOSED = "closed"
    """The outcome is reported and nothing can be touched any more; whatever comes late is absorbed."""


class Input(enum.Enum):
    POSTS = "posts"
    """The other end became known, and we are the one to post."""
    OFFERS = "offers"
    """We told the peer about our blocks."""
    COMPLETE = "complete"
    """Every byte is confirmed."""
    FAIL = "fail"
    """A post of ours failed, or the poster ended without delivering."""
    CANCEL = "cancel"
    """Somebody on our side, or the peer that owns the blocks, gave the transfer up."""
    EXPIRE = "expire"
    """The state's deadline passed."""
    LOST = "lost"
    """The peer's process is certainly gone. Silence is not that: it only lets deadlines pass."""
    QUIET = "quiet"
    """Nothing can touch the blocks any more: no handle of ours is in flight, or the poster said so."""


class Effect(enum.Enum):
    STOP_POSTING = "stop posting"
    TELL_CANCEL = "tell the peer to cancel"
    TELL_ENDED = "tell the peer it ended"
    FORGET_PEER = "forget the peer"
    FENCE_PEER = "make sure that a silent peer cannot touch our memory any more"
    REPORT = "report the outcome and give the blocks back"


_ABSORB: tuple[State | None, Outcome | None, tuple[Effect, ...]] = (None, None, ())
_END = (Effect.TELL_ENDED, Effect.REPORT)

TRANSITIONS: dict[tuple[State, Input], tuple[State | None, Outcome | None, tuple[Effect, ...]]] = {
    # (state, input): (next state or None for the same, outcome decided here, effects in order)
    (State.OPEN, Input.POSTS): (State.POSTING, None, ()),
    (State.OPEN, Input.OFFERS): (State.OFFERED, None, ()),
    (State.OPEN, Input.COMPLETE): (State.CLOSED, Outcome.DELIVERED, (Effect.REPORT,)),
    (State.OPEN, Input.FAIL): (State.CLOSED, Outcome.FAILED, _END),
    (State.OPEN, Input.CANCEL): (State.CLOSED, Outcome.CANCELLED, _END),
    (State.OPEN, Input.EXPIRE): (State.CLOSED, Outcome.EXPIRED, _END),
    (State.OPEN, Input.LOST): (State.CLOSED, Outcome.FAILED, (Effect.REPORT,)),
    (State.OPEN, Input.QUIET): _ABSORB,
    (State.POSTING, Input.POSTS): _ABSORB,
    (State.POSTING, Input.OFFERS): _ABSORB,
    (State.POSTING, Input.COMPLETE): (State.CLOSED, Outcome.DELIVERED, _END),
    (State.POSTING, Input.FAIL): (State.DRAINING, Outcome.FAILED, (Effect.STOP_POSTING,)),
    (State.POSTING, Input.CANCEL): (State.DRAINING, Outcome.CANCELLED, (Effect.STOP_POSTING,)),
    (State.POSTING, Input.EXPIRE): (State.DRAINING, Outcome.EXPIRED, (Effect.STOP_POSTING,)),
    (State.POSTING, Input.LOST): (State.DRAINING, Outcome.FAILED, (Effect.STOP_POSTING,)),
    (State.POSTING, Input.QUIET): _ABSORB,
    (State.OFFERED, Input.POSTS): _ABSORB,
    (State.OFFERED, Input.OFFERS): _ABSORB,
    (State.OFFERED, Input.COMPLETE): (State.CLOSED, Outcome.DELIVERED, (Effect.REPORT,)),
    (State.OFFERED, Input.FAIL): (State.CLOSED, Outcome.FAILED, (Effect.REPORT,)),
    (State.OFFERED, Input.CANCEL): (State.DRAINING, Outcome.CANCELLED, (Effect.TELL_CANCEL,)),
    (State.OFFERED, Input.EXPIRE): (State.DRAINING, Outcome.EXPIRED, (Effect.TELL_CANCEL,)),
    (State.OFFERED, Input.LOST): (State.CLOSED, Outcome.FAILED, (Effect.FORGET_PEER, Effect.REPORT)),
    (State.OFFERED, Input.QUIET): _ABSORB,
    (State.DRAINING, Input.POSTS): _ABSORB,
    (State.DRAINING, Input.OFFERS): _ABSORB,
    (State.DRAINING, Input.COMPLETE): (State.CLOSED, None, _END),
    (State.DRAINING, Input.FAIL): _ABSORB,
    (State.DRAINING, Input.CANCEL): _ABSORB,
    (State.DRAINING, Input.EXPIRE): (State.CLOSED, None, (Effect.FENCE_PEER, Effect.REPORT)),
    (State.DRAINING, Input.LOST): (State.CLOSED, None, (Effect.FORGET_PEER, Effect.REPORT)),
    (State.DRAINING, Input.QUIET): (State.CLOSED, None, _END),
    **{(State.CLOSED, late): _ABSORB for late in Input},
}


@dataclass(frozen=True)
class Deadlines:
    """How long a transfer may stay in a state without any sign of progress."""

    open_s: float = 30.0
    posting_s: float = 30.0
    offered_s: float = 30.0
    draining_s: float = 10.0

    def of(self, state: State) -> float:
        return {
            State.OPEN: self.open_s,
            State.POSTING: self.posting_s,
            State.OFFERED: self.offered_s,
            State.DRAINING: self.draining_s,
            State.CLOSED: float("inf"),
        }[state]


class Rendezvous:
    """One transfer at one end. `outcome` and `reason` are set once, by the input that decides them."""

    def __init__(self, deadlines: Deadlines, now_s: float) -> None:
        self.state = State.OPEN
        self.since_s = now_s
        self.outcome: Outcome | None = None
        self.reason = ""
        self._deadlines = deadlines
        self._is_peers_to_drain = False
        self.deadline_s = now_s + deadlines.of(State.OPEN)

    def handle(self, what: Input, now_s: float, reason: str = "", *, told: Outcome | None = None) -> tuple[Effect, ...]:
        """The effects to carry out, in order, now that `what` has happened.

        `told` is what the peer said became of the transfer: if `what` decides that now, it is so at our end too. That it
        was delivered, it cannot say in our place.
        """
        next_state, outcome, effects = TRANSITIONS[self.state, what]
        if outcome is not None:
            self.outcome = outcome if told is None or told is Outcome.DELIVERED else told
            self.reason = reason or what.value
        if next_state is not None:
            self._is_peers_to_drain = self.state is State.OFFERED
            self.state, self.since_s = next_state, now_s
            self.deadline_s = now_s + self._deadlines.of(next_state)
        return effects

    def heard(self, now_s: float) -> None:
        """The peer gave a sign of life. That prolongs waiting for it, also for its drain, but no moving of our own."""
        if self.state in {State.OPEN, State.OFFERED} or (self.state is State.DRAINING and self._is_peers_to_drain):
            self.deadline_s = now_s + self._deadlines.of(self.state)

    def moved(self, now_s: float) -> None:
        """Bytes of ours moved: the state's deadline starts anew, except that of a drain."""
        if self.state is not State.DRAINING:
            self.deadline_s = now_s + self._deadlines.of(self.state)

    def is_overdue(self, now_s: float) -> bool:
        return now_s >= self.deadline_s

    @property
    def is_closed(self) -> bool:
        return self.state is State.CLOSED

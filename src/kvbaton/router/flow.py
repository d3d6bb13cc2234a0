"""PURE. The life of one routed request: (state, what happened) -> (what to do, next state).

Invariant, the commit point: nothing is sent to the client before D's first byte (of an answer that is not a stream:
its last). D cannot have that byte before P's KV, or its own, so holding the head back costs no time, and until then
every failure still gets its true status. P failing first ends D's leg at once; D failing first ends P's. Once CLOSED,
nothing more happens.

```
push        BOTH ── prefill ok ──> DECODING ── first byte ──> STREAMING ── end ──> CLOSED
             └── first byte ──> STREAMING_EARLY ── prefill ok or lost ──┘
pull        PREFILLING ── prefill ok ──> DECODING ...       decode only    DECODING ...
unknown P   LEARNING ── learned ──> BOTH ...
```

STREAMING_EARLY: D's bytes came before P's answer. D has all it needs, so P's fate no longer matters to this request.
Read next: `relay.py`, which runs legs, feeds `step` and performs the effects.
"""

from __future__ import annotations

import enum

import msgspec

from kvbaton.errors import LocalProtocolError
from kvbaton.router.answers import Answer, FailureKind, LegFailure
from kvbaton.router.legs import Identity, PrefillAnswer, read_prefill_answer


class Route(enum.Enum):
    """How a request is dispatched. The value names it in the timeline."""

    PUSH = "push"
    PULL = "pull"
    DECODE_ONLY = "decode-only"


class State(enum.Enum):
    LEARNING = "learning"
    PREFILLING = "prefilling"
    BOTH = "both"
    DECODING = "decoding"
    STREAMING_EARLY = "streaming_early"
    STREAMING = "streaming"
    CLOSED = "closed"


class Input(enum.Enum):
    LEARNED = "learned"
    LEARN_FAILED = "learn_failed"
    PREFILL_OK = "prefill_ok"
    PREFILL_MOVED = "prefill_moved"
    """P is fine, but another engine than D was told of."""
    PREFILL_ERROR = "prefill_error"
    """P answered, with an error."""
    PREFILL_LOST = "prefill_lost"
    """P did not answer, or not usably."""
    DECODE_STARTED = "decode_started"
    """D's answer is good, and its first byte (or all of it) is here."""
    DECODE_ERROR = "decode_error"
    DECODE_LOST = "decode_lost"
    DECODE_ENDED = "decode_ended"
    CLIENT_GONE = "client_gone"


class Effect(enum.Enum):
    LEARN = "learn"
    SEND_PREFILL = "send_prefill"
    SEND_DECODE = "send_decode"
    RENEW_TICKET = "renew_ticket"
    """New transfer id: what comes back of the former dispatch is no longer ours."""
    COMMIT = "commit"
    """D's head and bytes go to the client from now on."""
    CANCEL_PREFILL = "cancel_prefill"
    """Also the wait for P's identity."""
    CANCEL_DECODE = "cancel_decode"
    PASS_ON_ERROR = "pass_on_error"  # noqa: S105
    """The engine's own error answer, as it came."""
    REPORT_LOSS = "report_loss"
    BREAK_STREAM = "break_stream"
    FINISH = "finish"
    ABANDON = "abandon"
    """The client is gone: nothing to say to anybody."""


Step = tuple[tuple[Effect, ...], State]

_BEGIN: dict[Route, Step] = {
    Route.PUSH: ((Effect.SEND_PREFILL, Effect.SEND_DECODE), State.BOTH),
    Route.PULL: ((Effect.SEND_PREFILL,), State.PREFILLING),
    Route.DECODE_ONLY: ((Effect.SEND_DECODE,), State.DECODING),
}

_TABLE: dict[tuple[State, Input], Step] = {
    (State.LEARNING, Input.LEARNED): ((Effect.SEND_PREFILL, Effect.SEND_DECODE), State.BOTH),
    (State.LEARNING, Input.LEARN_FAILED): ((Effect.REPORT_LOSS,), State.CLOSED),
    (State.LEARNING, Input.CLIENT_GONE): ((Effect.CANCEL_PREFILL, Effect.ABANDON), State.CLOSED),
    (State.PREFILLING, Input.PREFILL_OK): ((Effect.SEND_DECODE,), State.DECODING),
    (State.PREFILLING, Input.PREFILL_ERROR): ((Effect.PASS_ON_ERROR,), State.CLOSED),
    (State.PREFILLING, Input.PREFILL_LOST): ((Effect.REPORT_LOSS,), State.CLOSED),
    (State.PREFILLING, Input.CLIENT_GONE): ((Effect.CANCEL_PREFILL, Effect.ABANDON), State.CLOSED),
    (State.BOTH, Input.PREFILL_OK): ((), State.DECODING),
    (State.BOTH, Input.PREFILL_MOVED): (
        (Effect.CANCEL_DECODE, Effect.RENEW_TICKET, Effect.SEND_PREFILL, Effect.SEND_DECODE),
        State.BOTH,
    ),
    (State.BOTH, Input.PREFILL_ERROR): ((Effect.CANCEL_DECODE, Effect.PASS_ON_ERROR), State.CLOSED),
    (State.BOTH, Input.PREFILL_LOST): ((Effect.CANCEL_DECODE, Effect.REPORT_LOSS), State.CLOSED),
    (State.BOTH, Input.DECODE_STARTED): ((Effect.COMMIT,), State.STREAMING_EARLY),
    (State.BOTH, Input.DECODE_ERROR): ((Effect.CANCEL_PREFILL, Effect.PASS_ON_ERROR), State.CLOSED),
    (State.BOTH, Input.DECODE_LOST): ((Effect.CANCEL_PREFILL, Effect.REPORT_LOSS), State.CLOSED),
    (State.BOTH, Input.CLIENT_GONE): (
        (Effect.CANCEL_PREFILL, Effect.CANCEL_DECODE, Effect.ABANDON),
        State.CLOSED,
    ),
    (State.DECODING, Input.DECODE_STARTED): ((Effect.COMMIT,), State.STREAMING),
    (State.DECODING, Input.DECODE_ERROR): ((Effect.PASS_ON_ERROR,), State.CLOSED),
    (State.DECODING, Input.DECODE_LOST): ((Effect.REPORT_LOSS,), State.CLOSED),
    (State.DECODING, Input.CLIENT_GONE): ((Effect.CANCEL_DECODE, Effect.ABANDON), State.CLOSED),
    (State.STREAMING_EARLY, Input.PREFILL_OK): ((), State.STREAMING),
    (State.STREAMING_EARLY, Input.PREFILL_MOVED): ((), State.STREAMING),
    (State.STREAMING_EARLY, Input.PREFILL_ERROR): ((), State.STREAMING),
    (State.STREAMING_EARLY, Input.PREFILL_LOST): ((), State.STREAMING),
    # D had no need of P (it held the whole prompt, or recomputed it): P must not go on for nobody.
    (State.STREAMING_EARLY, Input.DECODE_ENDED): ((Effect.CANCEL_PREFILL, Effect.FINISH), State.CLOSED),
    (State.STREAMING_EARLY, Input.DECODE_LOST): ((Effect.CANCEL_PREFILL, Effect.BREAK_STREAM), State.CLOSED),
    (State.STREAMING_EARLY, Input.CLIENT_GONE): (
        (Effect.CANCEL_PREFILL, Effect.CANCEL_DECODE, Effect.ABANDON),
        State.CLOSED,
    ),
    (State.STREAMING, Input.DECODE_ENDED): ((Effect.FINISH,), State.CLOSED),
    (State.STREAMING, Input.DECODE_LOST): ((Effect.BREAK_STREAM,), State.CLOSED),
    (State.STREAMING, Input.CLIENT_GONE): ((Effect.CANCEL_DECODE, Effect.ABANDON), State.CLOSED),
}


def begin(route: Route, *, knows_identity: bool) -> Step:
    """The first step. A push must know P's identity before D can be told."""
    if route is Route.PUSH and not knows_identity:
        return ((Effect.LEARN,), State.LEARNING)
    return _BEGIN[route]


def step(state: State, happened: Input) -> Step:
    """The next step.

    Raises LocalProtocolError for an input that cannot come in `state`: the shell fed a leg that it never started.
    """
    if state is State.CLOSED:
        return ((), State.CLOSED)
    try:
        return _TABLE[state, happened]
    except KeyError:
        raise LocalProtocolError(f"{happened.value} cannot happen while {state.value}") from None


class PrefillVerdict(msgspec.Struct, frozen=True):
    """What the end of P's leg amounts to: the input, what it carries, and P's params if it sent any."""

    happened: Input
    detail: Answer | LegFailure | None
    answer: PrefillAnswer | None


def judge_prefill(reply: Answer | LegFailure, expected: Identity | None, *, may_redispatch: bool) -> PrefillVerdict:
    """P's reply as an input. `expected`: what D was told (push), or None when D will be told what P says (pull)."""
    if isinstance(reply, LegFailure):
        return PrefillVerdict(Input.PREFILL_LOST, reply, None)
    if not reply.is_ok:
        return PrefillVerdict(Input.PREFILL_ERROR, reply, None)
    answer = read_prefill_answer(reply.body)
    if isinstance(answer, str):
        return PrefillVerdict(Input.PREFILL_LOST, LegFailure(FailureKind.BAD_ANSWER, answer), None)
    if expected is None or answer.identity == expected:
        return PrefillVerdict(Input.PREFILL_OK, None, answer)
    if may_redispatch:
        return PrefillVerdict(Input.PREFILL_MOVED, None, answer)
    detail = "it answers as another engine each time; give every engine its own URL (not a load balancer's)"
    return PrefillVerdict(Input.PREFILL_LOST, LegFailure(FailureKind.MOVED, detail), answer)

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.errors import LocalProtocolError
from kvbaton.router.answers import Answer, FailureKind, LegFailure, Side, lost_answer, lost_event
from kvbaton.router.flow import Effect, Input, Route, State, begin, judge_prefill, step
from kvbaton.router.legs import Identity, PrefillAnswer
from kvbaton.types import EngineId

IDENTITY = Identity(EngineId("e"), "h", 5600, 1, 1)
LOSS = LegFailure(FailureKind.BROKEN, "it broke")


def answered(engine_id: str = "e", status: int = 200) -> Answer:
    params = {"remote_engine_id": engine_id, "remote_host": "h", "remote_port": 5600, "tp_size": 1, "pp_size": 1}
    return Answer(status, (), json.dumps({"kv_transfer_params": params}).encode())


def run(route: Route, *inputs: Input, knows_identity: bool = True) -> tuple[list[Effect], State]:
    effects, state = begin(route, knows_identity=knows_identity)
    done = list(effects)
    for happened in inputs:
        effects, state = step(state, happened)
        done += effects
    return done, state


BOTH = [Effect.SEND_PREFILL, Effect.SEND_DECODE]


@pytest.mark.parametrize(
    ("inputs", "after"),
    [
        ([Input.PREFILL_OK, Input.DECODE_STARTED, Input.DECODE_ENDED], [Effect.COMMIT, Effect.FINISH]),
        ([Input.DECODE_STARTED, Input.PREFILL_OK, Input.DECODE_ENDED], [Effect.COMMIT, Effect.FINISH]),
        ([Input.DECODE_STARTED, Input.PREFILL_LOST, Input.DECODE_ENDED], [Effect.COMMIT, Effect.FINISH]),
        ([Input.DECODE_STARTED, Input.DECODE_ENDED], [Effect.COMMIT, Effect.CANCEL_PREFILL, Effect.FINISH]),
        ([Input.PREFILL_ERROR], [Effect.CANCEL_DECODE, Effect.PASS_ON_ERROR]),
        ([Input.PREFILL_LOST], [Effect.CANCEL_DECODE, Effect.REPORT_LOSS]),
        ([Input.DECODE_ERROR], [Effect.CANCEL_PREFILL, Effect.PASS_ON_ERROR]),
        ([Input.DECODE_LOST], [Effect.CANCEL_PREFILL, Effect.REPORT_LOSS]),
        ([Input.PREFILL_OK, Input.DECODE_LOST], [Effect.REPORT_LOSS]),
        ([Input.PREFILL_OK, Input.DECODE_STARTED, Input.DECODE_LOST], [Effect.COMMIT, Effect.BREAK_STREAM]),
        ([Input.CLIENT_GONE], [Effect.CANCEL_PREFILL, Effect.CANCEL_DECODE, Effect.ABANDON]),
        (
            [Input.PREFILL_MOVED, Input.PREFILL_OK],
            [Effect.CANCEL_DECODE, Effect.RENEW_TICKET, Effect.SEND_PREFILL, Effect.SEND_DECODE],
        ),
    ],
)
def test_push(inputs: list[Input], after: list[Effect]) -> None:
    assert run(Route.PUSH, *inputs)[0] == BOTH + after


def test_push_to_an_unknown_prefill_learns_first() -> None:
    assert run(Route.PUSH, knows_identity=False)[0] == [Effect.LEARN]
    assert run(Route.PUSH, Input.LEARNED, knows_identity=False)[0] == [Effect.LEARN, *BOTH]
    assert run(Route.PUSH, Input.LEARN_FAILED, knows_identity=False)[0] == [Effect.LEARN, Effect.REPORT_LOSS]
    assert run(Route.PUSH, Input.CLIENT_GONE, knows_identity=False)[0] == [
        Effect.LEARN,
        Effect.CANCEL_PREFILL,
        Effect.ABANDON,
    ]


@pytest.mark.parametrize("knows_identity", [True, False])
def test_pull_is_sequential(*, knows_identity: bool) -> None:
    assert run(Route.PULL, knows_identity=knows_identity)[0] == [Effect.SEND_PREFILL]
    assert run(Route.PULL, Input.PREFILL_OK, knows_identity=knows_identity)[0] == BOTH
    assert run(Route.PULL, Input.PREFILL_ERROR)[0] == [Effect.SEND_PREFILL, Effect.PASS_ON_ERROR]


def test_decode_only() -> None:
    done, state = run(Route.DECODE_ONLY, Input.DECODE_STARTED, Input.DECODE_ENDED, knows_identity=False)
    assert done == [Effect.SEND_DECODE, Effect.COMMIT, Effect.FINISH]
    assert state is State.CLOSED


def test_closed_absorbs_everything() -> None:
    for happened in Input:
        assert step(State.CLOSED, happened) == ((), State.CLOSED)


def test_an_impossible_input_is_our_own_fault() -> None:
    with pytest.raises(LocalProtocolError, match="decode_ended cannot happen while prefilling"):
        step(State.PREFILLING, Input.DECODE_ENDED)


class _Legs:
    """Two legs that behave as real ones may, and the promises checked at each effect."""

    def __init__(self) -> None:
        self.prefill: list[Input] = []
        self.decode: list[Input] = []
        self.learning = False
        self.may_redispatch = True
        self.is_client_here = True
        self.is_committed = False
        self.endings: list[Effect] = []
        self.dispatches = 0

    def perform(self, effect: Effect) -> None:
        match effect:
            case Effect.LEARN:
                self.learning = True
            case Effect.SEND_PREFILL:
                assert not self.prefill
                self.prefill = [Input.PREFILL_OK, Input.PREFILL_ERROR, Input.PREFILL_LOST]
                if self.may_redispatch:
                    self.prefill.append(Input.PREFILL_MOVED)
                self.dispatches += 1
            case Effect.SEND_DECODE:
                assert not self.decode
                self.decode = [Input.DECODE_STARTED, Input.DECODE_ERROR, Input.DECODE_LOST]
            case Effect.RENEW_TICKET:
                assert not self.prefill
                assert not self.decode
                self.may_redispatch = False
            case Effect.CANCEL_PREFILL:
                assert self.prefill or self.learning
                self.prefill, self.learning = [], False
            case Effect.CANCEL_DECODE:
                assert self.decode
                self.decode = []
            case Effect.COMMIT:
                assert not self.is_committed
                self.is_committed = True
            case _:
                self.endings.append(effect)

    def possible(self) -> list[Input]:
        learning = [Input.LEARNED, Input.LEARN_FAILED] if self.learning else []
        return [*learning, *self.prefill, *self.decode, *([Input.CLIENT_GONE] if self.is_client_here else [])]

    def happens(self, happened: Input) -> None:
        if happened in self.prefill:
            self.prefill = []
        elif happened is Input.DECODE_STARTED:
            self.decode = [Input.DECODE_ENDED, Input.DECODE_LOST]
        elif happened in self.decode:
            self.decode = []
        elif happened is Input.CLIENT_GONE:
            self.is_client_here = False
        else:
            self.learning = False


@given(st.data(), st.sampled_from(Route), st.booleans())
def test_any_course_of_events_ends_well(data: Any, route: Route, knows_identity: bool) -> None:
    legs = _Legs()
    legs.may_redispatch = route is Route.PUSH  # a pull's P cannot be another than expected
    effects, state = begin(route, knows_identity=knows_identity)
    for _ in range(12):
        for effect in effects:
            legs.perform(effect)
        if state is State.CLOSED:
            break
        assert not legs.endings
        happened = data.draw(st.sampled_from(legs.possible()))
        was_committed = legs.is_committed
        legs.happens(happened)
        effects, state = step(state, happened)
        if happened is Input.CLIENT_GONE:
            assert effects[-1] is Effect.ABANDON
        if was_committed:  # the head is out: no other answer may follow
            assert not {Effect.PASS_ON_ERROR, Effect.REPORT_LOSS, Effect.RENEW_TICKET} & set(effects)
    assert state is State.CLOSED
    assert len(legs.endings) == 1
    assert not legs.prefill, "a prefill leg is left running"
    assert not legs.decode, "a decode leg is left running"
    assert not legs.learning
    assert legs.dispatches <= 2
    assert (legs.endings[0] in (Effect.FINISH, Effect.BREAK_STREAM)) <= legs.is_committed


# -- judging P's reply ---------------------------------------------------------------------------------------------


def test_judgement() -> None:
    def judge(reply: Answer | LegFailure, expected: Identity | None = IDENTITY, *, may: bool = True) -> Input:
        return judge_prefill(reply, expected, may_redispatch=may).happened

    assert judge(LOSS) is Input.PREFILL_LOST
    assert judge(answered(status=400)) is Input.PREFILL_ERROR
    assert judge(answered(status=302)) is Input.PREFILL_ERROR
    assert judge(Answer(200, (), b"{}")) is Input.PREFILL_LOST
    assert judge(answered()) is Input.PREFILL_OK
    assert judge(answered("other"), None) is Input.PREFILL_OK
    assert judge(answered("other")) is Input.PREFILL_MOVED
    assert judge(answered("other"), may=False) is Input.PREFILL_LOST


def test_judgement_carries_what_is_needed_next() -> None:
    moved = judge_prefill(answered("other"), IDENTITY, may_redispatch=True)
    assert isinstance(moved.answer, PrefillAnswer)
    assert moved.answer.identity.remote_engine_id == "other"
    error = judge_prefill(answered(status=500), IDENTITY, may_redispatch=True)
    assert error.detail == answered(status=500)
    unstable = judge_prefill(answered("other"), IDENTITY, may_redispatch=False)
    assert isinstance(unstable.detail, LegFailure)
    assert unstable.detail.kind is FailureKind.MOVED


@pytest.mark.parametrize("kind", FailureKind)
@pytest.mark.parametrize("side", Side)
def test_a_loss_names_the_instance_and_the_remedy(side: Side, kind: FailureKind) -> None:
    failure = LegFailure(kind, "why")
    answer = lost_answer(side, "http://x:1", failure)
    assert answer.status in (502, 503, 504)
    error = json.loads(answer.body)["error"]
    for word in ("http://x:1", "why", "retry", side.value):
        assert word in error["message"].lower()
    assert error["code"] == f"{side.value}_{kind.value}"
    event = lost_event(side, "http://x:1", failure)
    assert event.startswith(b"\n\ndata: {")
    assert event.endswith(b"}\n\n")
    assert json.loads(event[8:])["error"]["code"] == error["code"]

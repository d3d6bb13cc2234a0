"""One transfer's life at one end: the table, its deadlines, and the paths that matter."""

from __future__ import annotations

import pytest

from kvbaton.protocol.rendezvous import TRANSITIONS, Deadlines, Effect, Input, Rendezvous, State
from kvbaton.types import Outcome

DEADLINES = Deadlines(open_s=1.0, posting_s=2.0, offered_s=3.0, draining_s=4.0)


def machine(*inputs: Input) -> Rendezvous:
    made = Rendezvous(DEADLINES, now_s=0.0)
    for what in inputs:
        made.handle(what, 0.0, what.value)
    return made


TO = {
    State.OPEN: (),
    State.POSTING: (Input.POSTS,),
    State.OFFERED: (Input.OFFERS,),
    State.DRAINING: (Input.POSTS, Input.CANCEL),
    State.CLOSED: (Input.FAIL,),
}


def test_the_table_answers_every_input_in_every_state() -> None:
    assert set(TRANSITIONS) == {(state, what) for state in State for what in Input}


@pytest.mark.parametrize("key", TRANSITIONS)
def test_blocks_are_given_back_on_entering_closed_and_only_then(key: tuple[State, Input]) -> None:
    next_state, outcome, effects = TRANSITIONS[key]
    enters_closed = next_state is State.CLOSED
    assert effects.count(Effect.REPORT) == int(enters_closed)
    if enters_closed:
        assert effects[-1] is Effect.REPORT
        # Decided now, or when the drain began.
        assert (outcome is None) == (key[0] is State.DRAINING)


@pytest.mark.parametrize("key", TRANSITIONS)
def test_only_completion_decides_delivered(key: tuple[State, Input]) -> None:
    assert (TRANSITIONS[key][1] is Outcome.DELIVERED) == (
        key[1] is Input.COMPLETE and key[0] in {State.OPEN, State.POSTING, State.OFFERED}
    )


@pytest.mark.parametrize("state", [State.POSTING, State.OFFERED])
def test_blocks_that_somebody_may_touch_are_never_given_back_by_a_deadline_alone(state: State) -> None:
    """The transport, or the peer, is stopped first; only a drain's end fences and gives back."""
    for what in (Input.CANCEL, Input.EXPIRE):
        assert TRANSITIONS[state, what][0] is State.DRAINING
    _, _, effects = TRANSITIONS[State.DRAINING, Input.EXPIRE]
    assert effects == (Effect.FENCE_PEER, Effect.REPORT)


@pytest.mark.parametrize(("state", "inputs"), TO.items())
def test_every_state_but_closed_has_a_deadline(state: State, inputs: tuple[Input, ...]) -> None:
    made = machine(*inputs)
    assert made.state is state
    assert made.deadline_s == DEADLINES.of(state)
    assert not made.is_overdue(0.5)
    assert made.is_overdue(1e9) is not made.is_closed


@pytest.mark.parametrize(
    ("state", "heard", "moved"),
    [
        (State.OPEN, True, True),
        (State.POSTING, False, True),
        (State.OFFERED, True, True),
        (State.DRAINING, False, False),
    ],
)
def test_what_prolongs_what(state: State, heard: bool, moved: bool) -> None:
    for prolong, does in ((Rendezvous.heard, heard), (Rendezvous.moved, moved)):
        made = machine(*TO[state])
        before_s = made.deadline_s
        prolong(made, 0.5)
        assert made.deadline_s == before_s + 0.5 * does


def test_a_drain_of_the_peers_lasts_as_long_as_it_says_so() -> None:
    """Found: blocks were given back while the poster, alive and asked, still had its operation in flight."""
    made = machine(Input.OFFERS, Input.CANCEL)
    made.heard(0.5)
    made.moved(0.7)
    assert made.deadline_s == 0.5 + DEADLINES.draining_s


def test_the_first_reason_stays() -> None:
    made = machine(Input.POSTS)
    made.handle(Input.FAIL, 0.0, "the link broke")
    made.handle(Input.CANCEL, 0.0, "given up")
    made.handle(Input.QUIET, 0.0)
    assert (made.outcome, made.reason) == (Outcome.FAILED, "the link broke")


def test_without_a_reason_the_input_is_the_reason() -> None:
    made = machine()
    made.handle(Input.EXPIRE, 0.0)
    assert made.reason == "expire"


def test_everything_arriving_during_a_drain_does_not_make_it_a_success() -> None:
    made = machine(Input.OFFERS, Input.CANCEL, Input.COMPLETE)
    assert (made.state, made.outcome) == (State.CLOSED, Outcome.CANCELLED)


@pytest.mark.parametrize(
    ("told", "outcome"),
    [
        (None, Outcome.FAILED),
        (Outcome.CANCELLED, Outcome.CANCELLED),
        (Outcome.EXPIRED, Outcome.EXPIRED),
        (Outcome.DELIVERED, Outcome.FAILED),
    ],
)
def test_what_the_peer_said_became_of_it_stands_unless_it_says_that_we_have_it(
    told: Outcome | None, outcome: Outcome
) -> None:
    transfer = Rendezvous(Deadlines(), 0.0)
    transfer.handle(Input.OFFERS, 0.0)
    transfer.handle(Input.FAIL, 1.0, "the peer ended it", told=told)
    assert transfer.outcome is outcome
    transfer.handle(Input.FAIL, 2.0, told=Outcome.CANCELLED)
    assert transfer.outcome is outcome

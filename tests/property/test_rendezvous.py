"""From any state any input is legal; the end comes once, absorbs everything, and is never better than it was."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvbaton.protocol.rendezvous import Deadlines, Effect, Input, Rendezvous, State
from kvbaton.types import Outcome

DEADLINES = Deadlines(open_s=3.0, posting_s=2.0, offered_s=4.0, draining_s=1.0)
actions = st.lists(st.sampled_from([*Input, "heard", "moved"]), max_size=30)


@given(actions, st.lists(st.floats(0, 2), min_size=30, max_size=30))
def test_a_life(actions: list[Input | str], waits_s: list[float]) -> None:
    machine, now_s = Rendezvous(DEADLINES, 0.0), 0.0
    num_reports, stopped = 0, False
    for what, wait_s in zip(actions, waits_s, strict=False):
        now_s += wait_s
        state, outcome, deadline_s = machine.state, machine.outcome, machine.deadline_s
        if what == "heard":
            machine.heard(now_s)
        elif what == "moved":
            machine.moved(now_s)
        else:
            assert isinstance(what, Input)
            effects = machine.handle(what, now_s, "reason")
            num_reports += effects.count(Effect.REPORT)
            stopped |= Effect.STOP_POSTING in effects or Effect.TELL_CANCEL in effects
        if state is State.CLOSED:
            assert (machine.state, machine.outcome, machine.deadline_s) == (state, outcome, deadline_s)
        if outcome is not None:
            assert machine.outcome is outcome
        assert (machine.outcome is not None) == (machine.state in {State.DRAINING, State.CLOSED})
        assert num_reports == int(machine.is_closed)
        assert machine.deadline_s <= now_s + DEADLINES.of(machine.state)
        assert stopped or machine.state is not State.DRAINING
        if machine.outcome is Outcome.DELIVERED:
            assert machine.is_closed


@given(actions)
def test_left_alone_everything_ends(actions: list[Input | str]) -> None:
    """Two deadlines after the last input at the latest: one to begin the drain, one to end it."""
    machine = Rendezvous(DEADLINES, 0.0)
    for what in actions:
        if isinstance(what, Input):
            machine.handle(what, 0.0)
    for _ in range(2):
        if machine.is_overdue(machine.deadline_s):
            machine.handle(Input.EXPIRE, machine.deadline_s)
    assert machine.is_closed

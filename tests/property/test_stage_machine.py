"""The seven invariants of the protocol as a Hypothesis state machine: the same stage as in test_storms.py, other schedules.

Hypothesis looks for schedules that fail and cuts them down by itself; whatever step it takes, the stage checks at once.
"""

from __future__ import annotations

import logging

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.property.stage import CASTS, FATES, MAX_STORIES, Stage

small = st.integers(0, 3)
story = st.integers(0, MAX_STORIES - 1)


class StageMachine(RuleBasedStateMachine):
    stage: Stage

    @initialize(cast=st.integers(0, len(CASTS) - 1))
    def begin(self, cast: int) -> None:
        logging.disable(logging.CRITICAL)
        self.stage = Stage(cast)

    @rule(p=small, d=small, is_pull=st.integers(0, 1), chunk=st.sampled_from((4, 6, 14)), first=st.integers(0, 2))
    def dispatch(self, p: int, d: int, is_pull: int, chunk: int, first: int) -> None:
        self.stage.begin(p, d, is_pull, chunk, first)

    @rule(index=story, is_wanted_first=st.booleans(), num_chunks=st.integers(0, 3))
    def go_on(self, index: int, is_wanted_first: bool, num_chunks: int) -> None:
        if is_wanted_first:
            self.stage.want(index)
        self.stage.open(index)
        for _ in range(num_chunks):
            self.stage.compute(index)
        self.stage.want(index)

    @rule(index=story)
    def compute(self, index: int) -> None:
        self.stage.compute(index)

    @rule(index=story)
    def finish(self, index: int) -> None:
        self.stage.finish(index)

    @rule(index=story)
    def abort(self, index: int) -> None:
        self.stage.abort(index)

    @rule(index=story)
    def preempt(self, index: int) -> None:
        self.stage.preempt(index)

    @rule(index=story)
    def cancel(self, index: int) -> None:
        self.stage.cancel(index)

    @rule(index=story)
    def spurn(self, index: int) -> None:
        self.stage.spurn(index)

    @rule(kind=st.integers(0, len(FATES) - 1))
    def fate(self, kind: int) -> None:
        self.stage.fate(kind)

    @rule(num_copies=st.sampled_from((0, 2)))
    def message(self, num_copies: int) -> None:
        self.stage.message(num_copies)

    @rule(num_polls=st.integers(0, 5))
    def slow_link(self, num_polls: int) -> None:
        self.stage.slow_link(num_polls)

    @rule()
    def land(self) -> None:
        self.stage.land()

    @rule(rank=small, num_pieces=st.integers(1, 3))
    def drift(self, rank: int, num_pieces: int) -> None:
        self.stage.drift(rank, num_pieces)

    @rule(rank=small)
    def stop(self, rank: int) -> None:
        self.stage.stop(rank)

    @rule(rank=small)
    def resume(self, rank: int) -> None:
        self.stage.resume(rank)

    @rule(p=small, d=small)
    def cut(self, p: int, d: int) -> None:
        self.stage.cut(p, d)

    @rule()
    def heal(self) -> None:
        self.stage.heal()

    @rule(p=small, d=small)
    def break_line(self, p: int, d: int) -> None:
        self.stage.break_line(p, d)

    @rule(engine=small)
    def crash(self, engine: int) -> None:
        self.stage.crash(engine)

    @rule(engine=small)
    def restart(self, engine: int) -> None:
        self.stage.restart(engine)

    @rule(num_rounds=st.integers(1, 3))
    def run(self, num_rounds: int) -> None:
        self.stage.run(num_rounds)

    @rule(rank=small, tenths=st.integers(0, 40))
    def turn(self, rank: int, tenths: int) -> None:
        self.stage.tick_apart(rank, tenths)

    @rule(num_ticks=st.integers(1, 6))
    def pass_time(self, num_ticks: int) -> None:
        self.stage.pass_time(num_ticks)

    def teardown(self) -> None:
        try:
            if hasattr(self, "stage"):
                self.stage.end()
        finally:
            logging.disable(logging.NOTSET)


StageMachine.TestCase.settings = settings(max_examples=1500, stateful_step_count=40)
TestStage = StageMachine.TestCase

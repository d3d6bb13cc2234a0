"""The soak's plan, judgement and sums: pure, so that what it says of real engines can be believed."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import pytest

from kvbaton.bench import soak
from kvbaton.bench.flags import add_bench
from kvbaton.bench.records import Environment
from kvbaton.bench.soak_expected import expected_path, read_expected, write_expected
from kvbaton.bench.soak_judge import Fault, Heard, Verdict, judge, reason
from kvbaton.bench.soak_plan import Leave, SoakPlan, plan_soak
from kvbaton.bench.soak_report import Attempt, KillRecord, PoolRecord, SoakReport, counts_line
from kvbaton.errors import UsageError
from kvbaton.types import Direction

EXPECTED = (5, 6, 7)


def plan(seed: int, num_requests: int = 2000) -> SoakPlan:
    return plan_soak(
        random.Random(seed),
        num_requests=num_requests,
        leaving_share=0.1,
        kills_per_engine=2,
        directions=tuple(Direction),
    )


class TestPlan:
    def test_the_same_seed_is_the_same_soak(self) -> None:
        assert plan(3) == plan(3)
        assert plan(3) != plan(4)

    def test_every_connector_is_sent_the_same(self) -> None:
        one_way = plan_soak(
            random.Random(3), num_requests=200, leaving_share=0.1, kills_per_engine=2, directions=(Direction.PULL,)
        )
        both = plan(3, 200)
        assert (one_way.prompts, one_way.max_output_tokens, one_way.kills) == (
            both.prompts,
            both.max_output_tokens,
            both.kills,
        )
        assert {request.direction for request in one_way.requests} == {Direction.PULL}

    def test_everything_that_was_promised_is_in_it(self) -> None:
        made = plan(1)
        lengths = [len(made.prompts[request.prompt]) for request in made.requests]
        assert min(lengths) < 32
        assert max(lengths) > 3 * 512
        leaving = [request for request in made.requests if request.leave is not Leave.NEVER]
        assert 0.07 < len(leaving) / len(made.requests) < 0.13
        assert {request.leave for request in made.requests} == set(Leave)
        for direction in Direction:
            assert 900 < sum(request.direction is direction for request in made.requests) < 1100
        assert 900 < sum(request.is_streaming for request in made.requests) < 1100

    def test_some_prompts_are_repeated_and_some_continue_earlier_ones(self) -> None:
        made = plan(1, 400)
        assert len(made.prompts) < 380
        starts = {prompt for prompt in made.prompts if len(prompt) > 32}
        continued = [prompt for prompt in starts if any(prompt[:at] in starts for at in range(33, len(prompt)))]
        assert len(continued) > 20

    def test_enough_of_every_answer_is_known(self) -> None:
        made = plan(2)
        for request in made.requests:
            assert made.max_output_tokens[request.prompt] >= request.output_tokens
            assert (request.patience_tokens or 0) < request.output_tokens

    def test_engines_are_killed_in_turn_while_there_is_load(self) -> None:
        for seed in range(50):
            kills = plan(seed, 100).kills
            assert [kill.role for kill in kills] == ["prefill", "decode"] * 2
            places = [kill.after_requests for kill in kills]
            assert places == sorted(set(places))
            assert places[0] > 0
            assert places[-1] < 100


class TestJudge:
    @pytest.mark.parametrize(
        ("heard", "verdict"),
        [
            (Heard(status=200, tokens=EXPECTED, is_whole=True), Verdict.RIGHT),
            (Heard(status=200, tokens=(5, 6, 8), is_whole=True), Verdict.WRONG),
            (Heard(status=200, tokens=(5, 6, 7, 8), is_whole=True), Verdict.WRONG),
            (Heard(status=200, tokens=(9,), has_left=True), Verdict.WRONG),
            (Heard(status=200, tokens=(9,), fault=Fault("lost")), Verdict.WRONG),
            (Heard(status=None, has_left=True), Verdict.LEFT),
            (Heard(status=200, tokens=(5,), has_left=True), Verdict.LEFT),
            (Heard(status=200, tokens=(5,), is_late=True), Verdict.HUNG),
            (Heard(status=None, is_late=True), Verdict.HUNG),
            (Heard(status=503, fault=Fault("not ready"), is_whole=True), Verdict.FAILED),
            (Heard(status=429, fault=Fault("busy"), is_whole=True), Verdict.FAILED),
            (Heard(status=200, tokens=(5,), fault=Fault("lost")), Verdict.FAILED),
            (Heard(status=200, tokens=(5, 6), is_whole=True), Verdict.DISHONEST),
            (Heard(status=200, is_whole=True), Verdict.DISHONEST),
            (Heard(status=200, tokens=EXPECTED), Verdict.DISHONEST),
            (Heard(status=500, is_whole=True), Verdict.DISHONEST),
            (Heard(status=500, fault=Fault(""), is_whole=True), Verdict.DISHONEST),
            (Heard(status=400, fault=Fault("no"), is_whole=True), Verdict.DISHONEST),
            (Heard(status=None, broken="ConnectionResetError"), Verdict.DISHONEST),
        ],
    )
    def test_verdict(self, heard: Heard, verdict: Verdict) -> None:
        assert judge(heard, EXPECTED) is verdict

    def test_reasons_are_classes_and_not_sentences(self) -> None:
        assert reason(Heard(status=503, fault=Fault("x", "service_unavailable", "not_ready"))) == "not_ready"
        assert reason(Heard(status=500, fault=Fault("x", "InternalServerError", 500))) == "500"
        assert reason(Heard(status=500, fault=Fault("x"))) == "no class"
        assert reason(Heard(status=200, is_late=True)) == "no end before the deadline"
        assert reason(Heard(status=None, broken="TimeoutError")) == "TimeoutError"
        assert reason(Heard(status=200)) == "an end without enough tokens"
        assert reason(Heard(status=500)) == "no error object"


def attempt(number: int, verdict: Verdict, sent_s: float = 0.0, ended_s: float = 1.0, status: int = 200) -> Attempt:
    return Attempt(
        request=number,
        direction="push",
        is_streaming=False,
        sent_s=sent_s,
        ended_s=ended_s,
        verdict=verdict,
        status=status,
        num_tokens=0,
        reason="not_ready" if verdict is Verdict.FAILED else None,
    )


def report(attempts: list[Attempt], **changes: object) -> SoakReport:
    fields: dict[str, object] = {
        "mode": "kvbaton",
        "title": "kvbaton",
        "model": "tiny",
        "settings": {"seed": 1},
        "environment": Environment(date="d", command="c", machine="m", num_cores=2, versions={"vllm": "v"}),
        "took_s": 10.0,
        "attempts": tuple(attempts),
        "kills": (),
        "pools": (PoolRecord(engine="prefill-0", usage=0.0, empty_after_s=0.0, is_cache_reset=True),),
    }
    return SoakReport(**(fields | changes))  # type: ignore[arg-type]  # the keys above are the report's own


class TestReport:
    def test_a_failure_that_was_answered_later_is_no_complaint(self) -> None:
        made = report([attempt(0, Verdict.FAILED, status=503), attempt(0, Verdict.RIGHT), attempt(1, Verdict.LEFT)])
        assert made.complaints == ()
        assert made.num_requests == 2
        assert "every promise kept" in made.summary()
        assert "| 503 | not_ready | failed | instead of an answer | 1 |" in made.summary()

    @pytest.mark.parametrize("verdict", [Verdict.HUNG, Verdict.WRONG, Verdict.DISHONEST])
    def test_what_must_not_be_is_a_complaint_also_when_a_later_attempt_was_right(self, verdict: Verdict) -> None:
        made = report([attempt(0, verdict), attempt(0, Verdict.RIGHT)])
        assert len(made.complaints) == 1
        assert "What must not be" in made.summary()

    def test_requests_never_answered_are_a_complaint(self) -> None:
        assert report([attempt(0, Verdict.FAILED)]).complaints == ("1 requests never answered",)

    @pytest.mark.parametrize(
        ("pool", "complaint"),
        [
            (PoolRecord(engine="d", usage=0.25, empty_after_s=None, is_cache_reset=False), "d holds 25.00% of its blocks"),
            (PoolRecord(engine="d", usage=0.0, empty_after_s=1.0, is_cache_reset=False), "d cannot reset its prefix cache"),
        ],
    )  # fmt: skip
    def test_blocks_that_are_missing_are_a_complaint(self, pool: PoolRecord, complaint: str) -> None:
        assert report([attempt(0, Verdict.RIGHT)], pools=(pool,)).complaints == (complaint,)

    def test_recovery_counts_only_requests_that_were_sent_after_the_death(self) -> None:
        kill = KillRecord(engine="prefill-0", is_ours=True, after_requests=1, killed_s=10.0, served_s=30.0)
        attempts = [
            attempt(0, Verdict.RIGHT, 9.0, 31.0),  # was on its way already
            attempt(1, Verdict.FAILED, 29.0, 30.5),
            attempt(2, Verdict.RIGHT, 29.5, 32.0),
            attempt(3, Verdict.RIGHT, 33.0, 34.0),
        ]
        made = report(attempts, kills=(kill,))
        assert made.recovery_s(kill) == pytest.approx(22.0)
        assert "| prefill-0 | us | 1 | 20.0 s | 22.0 s |" in made.summary()
        assert report([], kills=(kill,)).recovery_s(kill) is None

    def test_an_engine_that_died_by_itself_is_a_complaint(self) -> None:
        kill = KillRecord(engine="decode-0", is_ours=False, after_requests=1, killed_s=1.0, served_s=2.0)
        assert report([attempt(0, Verdict.RIGHT)], kills=(kill,)).complaints == ("decode-0 died by itself",)

    def test_a_soak_that_was_stopped_says_so_and_blames_nobody_for_the_rest(self) -> None:
        made = report([attempt(0, Verdict.FAILED)], stopped="stopped by the user")
        assert made.complaints == ()
        assert "stopped by the user" in made.summary()

    def test_counts_line(self) -> None:
        assert counts_line([attempt(0, Verdict.RIGHT), attempt(1, Verdict.RIGHT), attempt(2, Verdict.LEFT)]) == (
            "2 right, 1 left"
        )


class TestCommand:
    def flags(self, *words: str) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        add_bench(parser)
        return parser.parse_args(["soak", *words])

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--requests", "0"), "--requests"),
            (("--requests", "7"), "too few for 4 kills"),
            (("--concurrency", "0"), "--concurrency"),
            (("--kills", "-1"), "--kills"),
            (("--deadline", "0"), "--deadline"),
            (("--deadline", "nan"), "--deadline"),
            (("--cancel-share", "1"), "--cancel-share"),
            (("--cancel-share", "nan"), "--cancel-share"),
        ],
    )
    def test_bad_flags_are_named(self, words: tuple[str, ...], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            soak.settings_from(self.flags(*words))

    def test_ours_goes_both_ways_and_an_in_tree_connector_its_own(self) -> None:
        assert soak.settings_from(self.flags()).directions == tuple(Direction)
        assert soak.settings_from(self.flags("--mode", "nixl-pull-edited")).directions == (Direction.PULL,)

    def test_expected_tokens_are_found_again_only_for_the_same_question(self, tmp_path: Path) -> None:
        small = plan(1, 20)
        path = expected_path(tmp_path, small, {"vllm": "1"})
        assert expected_path(tmp_path, small, {"vllm": "2"}) != path
        assert expected_path(tmp_path, plan(2, 20), {"vllm": "1"}) != path
        assert read_expected(path) is None
        write_expected(path, {1: (4,), 0: (2, 3)})
        assert read_expected(path) == {0: (2, 3), 1: (4,)}

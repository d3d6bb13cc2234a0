from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.router.policy import (
    InstanceView,
    Pair,
    Policy,
    Readiness,
    Snapshot,
    Unavailable,
    choose,
    known_models,
)

M = frozenset({"m"})


def view(
    url: str, in_flight: int = 0, readiness: Readiness = Readiness.READY, models: frozenset[str] = M
) -> InstanceView:
    return InstanceView(url=url, readiness=readiness, in_flight=in_flight, models=models)


def test_round_robin_takes_turns() -> None:
    seen = [
        choose(
            Policy.ROUND_ROBIN,
            Snapshot((view("p0"), view("p1", in_flight=9)), (view("d0"), view("d1")), turn, turn + 1),
            "m",
            wants_prefill=True,
        )
        for turn in range(3)
    ]
    assert seen == [Pair("p0", "d1"), Pair("p1", "d0"), Pair("p0", "d1")]


def test_least_in_flight_and_ties_go_round() -> None:
    snapshot = Snapshot((), (view("d0", 2), view("d1", 1), view("d2", 1)), decode_turn=0)
    assert choose(Policy.LEAST_IN_FLIGHT, snapshot, "m", wants_prefill=False) == Pair(None, "d1")
    idle = [Snapshot((), (view("d0"), view("d1")), decode_turn=turn) for turn in range(4)]
    chosen = [choose(Policy.LEAST_IN_FLIGHT, one, "m", wants_prefill=False) for one in idle]
    assert chosen == [Pair(None, "d0"), Pair(None, "d1")] * 2


def test_a_learning_prefill_is_the_last_resort() -> None:
    learning = view("p0", readiness=Readiness.LEARNING)
    snapshot = Snapshot((learning, view("p1", 50)), (view("d0"),))
    assert choose(Policy.LEAST_IN_FLIGHT, snapshot, "m", wants_prefill=True) == Pair("p1", "d0")
    snapshot = Snapshot((learning,), (view("d0"),))
    assert choose(Policy.LEAST_IN_FLIGHT, snapshot, "m", wants_prefill=True) == Pair("p0", "d0")


@pytest.mark.parametrize(
    ("prefills", "decodes", "word"),
    [
        ((view("p0"),), (view("d0", readiness=Readiness.DOWN),), "d0 is down"),
        ((view("p0"),), (view("d0", readiness=Readiness.LEARNING),), "d0 is learning"),
        ((view("p0", readiness=Readiness.DOWN),), (view("d0"),), "p0 is down"),
        ((view("p0", models=frozenset({"other"})),), (view("d0"),), "no ready prefill instance serves 'm'"),
        ((), (view("d0"),), "there is no prefill instance"),
    ],
)
def test_unavailable_says_why(prefills: tuple[InstanceView, ...], decodes: tuple[InstanceView, ...], word: str) -> None:
    choice = choose(Policy.ROUND_ROBIN, Snapshot(prefills, decodes), "m", wants_prefill=True)
    assert isinstance(choice, Unavailable)
    assert word in choice.reason


def test_known_models() -> None:
    snapshot = Snapshot((view("p", models=frozenset({"b", "a"})),), (view("d", models=frozenset({"b", "c"})),))
    assert known_models(snapshot) == ("a", "b", "c")


_views = st.lists(
    st.builds(
        InstanceView,
        url=st.sampled_from("abcdef"),
        readiness=st.sampled_from(Readiness),
        in_flight=st.integers(0, 5),
        models=st.frozensets(st.sampled_from("mn")),
    ),
    max_size=4,
    unique_by=lambda one: one.url,
).map(tuple)


@given(_views, _views, st.integers(0, 50), st.integers(0, 50), st.sampled_from(Policy), st.booleans())
def test_whoever_is_chosen_can_serve(
    prefills: tuple[InstanceView, ...],
    decodes: tuple[InstanceView, ...],
    prefill_turn: int,
    decode_turn: int,
    policy: Policy,
    wants_prefill: bool,
) -> None:
    choice = choose(policy, Snapshot(prefills, decodes, prefill_turn, decode_turn), "m", wants_prefill=wants_prefill)
    able_d = [one for one in decodes if one.readiness is Readiness.READY and "m" in one.models]
    able_p = [one for one in prefills if one.readiness is not Readiness.DOWN and "m" in one.models]
    if isinstance(choice, Unavailable):
        assert not able_d or (wants_prefill and not able_p)
        return
    assert choice.decode in {one.url for one in able_d}
    if policy is Policy.LEAST_IN_FLIGHT:
        least = min(one.in_flight for one in able_d)
        assert next(one for one in able_d if one.url == choice.decode).in_flight == least
    assert (choice.prefill is not None) == wants_prefill
    if choice.prefill is not None:
        assert choice.prefill in {one.url for one in able_p}


@given(st.integers(1, 6), st.integers(1, 60))
def test_round_robin_is_even(num_instances: int, num_requests: int) -> None:
    decodes = tuple(view(f"d{index}") for index in range(num_instances))
    chosen: Counter[str] = Counter()
    for turn in range(num_requests):
        choice = choose(Policy.ROUND_ROBIN, Snapshot((), decodes, decode_turn=turn), "m", wants_prefill=False)
        assert isinstance(choice, Pair)
        chosen[choice.decode] += 1
    assert max(chosen.values()) - min(chosen[one.url] for one in decodes) <= 1

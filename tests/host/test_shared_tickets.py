"""`n > 1` on the decode side: several requests with one prompt and one ticket, as vLLM makes them."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from kvbaton.runtime.events import DestinationOpened, NothingNeeded
from tests.host.rig import BLOCK_SIZE, Engine, Policy, of_type
from tests.host.tickets import PUSH, ticket

LENGTH, ERROR = "length", "error"
NAMES = ["0_d", "1_d", "2_d"]
PROMPT = list(range(4 * BLOCK_SIZE + 2))
MODES = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


def choices(num_blocks: int = 30, *, policy: Policy = "fail", is_async: bool = False) -> Engine:
    engine = Engine(num_blocks, policy=policy, is_async=is_async)
    for name in NAMES:
        engine.add(name, PROMPT, PUSH, max_tokens=3)
    engine.tick()
    return engine


def loaders(engine: Engine) -> list[str]:
    return [each.request_id for each in of_type(DestinationOpened, engine.commands)]


def reasons(engine: Engine) -> list[str | None]:
    return [engine.finish_reason(name) for name in NAMES]


@MODES
def test_one_loads_and_the_others_find_its_blocks(is_async: bool) -> None:
    engine = choices(is_async=is_async)
    for _ in range(5):
        engine.tick()
    assert loaders(engine) == ["0_d"]
    assert engine.scheduler.has_requests()
    engine.worker.deliver("0_d")
    computed = 0
    while engine.scheduler.has_requests() or engine.in_flight:
        engine.tick()
        computed += engine.handovers[-1].num_scheduled_tokens
    # Each computes the tokens after the last whole block (two of the prompt for those that did not load) and its answer.
    assert computed <= 3 * (3 + 1)
    assert reasons(engine) == [LENGTH] * 3
    assert len(engine.commands) == 1
    engine.check_empty()


@MODES
def test_in_a_pool_for_one_of_them_they_take_turns(is_async: bool) -> None:
    engine = choices(8, is_async=is_async)
    engine.run()
    assert reasons(engine) == [LENGTH] * 3
    assert loaders(engine) == ["0_d"]
    engine.check_empty()


@MODES
@pytest.mark.parametrize(("policy", "reason"), [("fail", ERROR), ("recompute", LENGTH)])
def test_when_every_load_fails_each_ends_as_the_policy_says(policy: Policy, reason: str, is_async: bool) -> None:
    engine = choices(policy=policy, is_async=is_async)
    for _ in range(60):
        for request_id in list(engine.worker.loading):
            engine.worker.fail(request_id)
        engine.tick()
    assert reasons(engine) == [reason] * 3
    assert loaders(engine) == NAMES
    engine.check_empty()


@MODES
def test_the_next_loads_when_the_first_is_given_up(is_async: bool) -> None:
    engine = choices(is_async=is_async)
    engine.abort("0_d")
    for _ in range(8):  # to the worker and back, and only then the next
        engine.tick()
    assert list(engine.worker.loading) == ["1_d"]
    engine.run()
    assert reasons(engine)[1:] == [LENGTH] * 2
    assert loaders(engine) == ["0_d", "1_d"]
    engine.check_empty()


@MODES
def test_what_was_delivered_to_one_that_left_before_its_first_step_is_computed(is_async: bool) -> None:
    """Its blocks never came into the prefix cache, and the prefill side has given its own back."""
    engine = choices(is_async=is_async)
    while engine.in_flight:
        engine.land()
    engine.worker.deliver("0_d")
    engine.step()
    assert engine.finish_reason("0_d") is None
    engine.abort("0_d")
    engine.run()
    assert reasons(engine)[1:] == [LENGTH] * 2
    assert loaders(engine) == ["0_d"]
    engine.check_empty()


@MODES
def test_all_given_up_at_once(is_async: bool) -> None:
    engine = choices(is_async=is_async)
    engine.abort(*NAMES)
    engine.run()
    assert loaders(engine) == ["0_d"]
    assert of_type(NothingNeeded, engine.commands) == []
    engine.check_empty()


def test_all_given_up_in_the_queue_let_the_prefill_side_go_once() -> None:
    engine = Engine()
    for name in NAMES:
        engine.add(name, PROMPT, PUSH)
    engine.abort(*NAMES)
    engine.run()
    assert engine.commands == [NothingNeeded(ticket())]
    engine.check_empty()


@MODES
def test_one_that_comes_when_another_decodes_already_loads_nothing(is_async: bool) -> None:
    engine = Engine(is_async=is_async)
    engine.add("0_d", PROMPT, PUSH, max_tokens=20)
    engine.step()
    engine.worker.deliver("0_d")
    for _ in range(6):
        engine.tick()
    engine.add("1_d", PROMPT, PUSH)
    engine.run()
    assert loaders(engine) == ["0_d"]
    assert engine.finish_reason("1_d") == LENGTH
    engine.check_empty()

"""vLLM's scheduler on the decode side: every request ends, and the pool is back where it started."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from vllm.config import SpeculativeConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvbaton.errors import Unsupported
from kvbaton.runtime.events import DestinationCancelled, DestinationOpened, NothingNeeded
from kvbaton.types import Direction, RequestId
from tests.host.rig import BLOCK_SIZE, Engine, Policy, cache_groups, make_config, of_type
from tests.host.tickets import PULL, PUSH, ticket

LENGTH, ERROR = "length", "error"
MODES = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


def opened(engine: Engine) -> list[DestinationOpened]:
    return of_type(DestinationOpened, engine.commands)


def loading(**made: object) -> Engine:
    """An engine with one request, `d` of ten tokens, whose KV is on its way."""
    engine = Engine(**made)  # type: ignore[arg-type]  # Engine's own keywords
    engine.add("d", 10, PUSH, max_tokens=3)
    engine.step()
    assert list(engine.worker.loading) == ["d"]
    return engine


@MODES
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("num_tokens", range(2, 2 * BLOCK_SIZE + 2))
def test_a_prompt_of_any_length_is_loaded_once(num_tokens: int, direction: Direction, is_async: bool) -> None:
    engine = Engine(is_async=is_async)
    engine.add("d", num_tokens, PUSH if direction is Direction.PUSH else PULL, max_tokens=3)
    handover = engine.schedule()
    num_blocks = -(-(num_tokens - 1) // BLOCK_SIZE)
    command = DestinationOpened(ticket("t", direction), RequestId("d"), 0, num_tokens - 1, engine.blocks("d"))
    assert handover.before_forward == [command]
    assert len(command.blocks[0]) == num_blocks
    engine.run()
    assert engine.finish_reason("d") == LENGTH
    assert engine.num_tokens("d") == 3
    assert engine.commands == [command]
    engine.check_empty()


def test_a_prompt_of_one_token_needs_nothing() -> None:
    engine = Engine()
    engine.add("d", 1, PUSH)
    assert engine.schedule().before_forward == [NothingNeeded(ticket())]
    engine.run()
    assert engine.finish_reason("d") == LENGTH
    engine.check_empty()


@MODES
@pytest.mark.parametrize("num_more", range(BLOCK_SIZE + 2))
def test_only_what_the_prefix_cache_lacks_is_loaded(num_more: int, is_async: bool) -> None:
    """With all but the last token there, which is computed here in any case, the prefill side is let go at once."""
    engine = Engine(is_async=is_async)
    prompt = list(range(2 * BLOCK_SIZE + 1))
    engine.add("before", prompt)
    engine.run()
    prompt += range(100, 100 + num_more)
    engine.add("d", prompt, PUSH, max_tokens=2)
    handover = engine.schedule()
    if num_more == 0:
        assert handover.before_forward == [NothingNeeded(ticket())]
        assert handover.num_scheduled_tokens == 1
    else:
        first, num_tokens = 2 * BLOCK_SIZE, len(prompt) - 1
        assert handover.before_forward == [
            DestinationOpened(ticket(), RequestId("d"), first, num_tokens, engine.blocks("d"))
        ]
    engine.run()
    assert engine.finish_reason("d") == LENGTH
    engine.check_empty()


def test_prompt_logprobs_need_the_whole_prompt_computed_here() -> None:
    """vLLM then loads nothing; the prefill side is let go at once."""
    engine = Engine()
    engine.add("d", 10, PUSH, prompt_logprobs=1)
    assert engine.schedule().before_forward == [NothingNeeded(ticket())]
    engine.run()
    engine.check_empty()


# -- clients that leave ----------------------------------------------------------------------------------------------


@MODES
def test_given_up_in_the_queue(is_async: bool) -> None:
    engine = Engine(is_async=is_async)
    engine.add("d", 10, PUSH)
    engine.abort("d")
    assert engine.scheduler.has_requests()  # for the step that says so
    assert engine.step().before_forward == [NothingNeeded(ticket())]
    engine.check_empty()


@MODES
def test_given_up_in_the_step_that_allocated_its_blocks(is_async: bool) -> None:
    engine = Engine(is_async=is_async)
    engine.add("d", 10, PUSH)
    engine.schedule()
    engine.abort("d")
    engine.land()
    assert engine.num_free < engine.num_free_at_first  # somebody may still write to them
    assert engine.step().before_forward == [DestinationCancelled(RequestId("d"))]
    engine.check_empty()


@MODES
def test_given_up_while_it_waits(is_async: bool) -> None:
    engine = loading(is_async=is_async)
    engine.step()
    engine.abort("d")
    assert engine.num_free < engine.num_free_at_first
    assert engine.step().before_forward == [DestinationCancelled(RequestId("d"))]
    engine.check_empty()


@MODES
@pytest.mark.parametrize("is_failed", [False, True])
def test_given_up_in_the_step_in_which_its_load_ends(is_failed: bool, is_async: bool) -> None:
    """What calls it off reaches a worker that has reported it already, and is nobody's then."""
    engine = loading(is_async=is_async)
    engine.schedule()
    engine.abort("d")
    (engine.worker.fail if is_failed else engine.worker.deliver)("d")
    engine.land()
    assert engine.num_free == engine.num_free_at_first
    assert engine.step().before_forward == [DestinationCancelled(RequestId("d"))]
    engine.check_empty()


@MODES
@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_given_up_after_its_load(num_steps: int, is_async: bool) -> None:
    """Before its first step its blocks are not in the prefix cache yet; afterwards it is a request like any other."""
    engine = loading(is_async=is_async)
    engine.worker.deliver("d")
    engine.step()
    for _ in range(num_steps):
        engine.step()
    engine.abort("d")
    engine.run()
    assert len(engine.commands) == 1
    engine.check_empty()


def test_given_up_while_a_newer_step_still_writes_its_blocks() -> None:
    """Nobody else's KV may be written there before that step has run."""
    engine = loading(is_async=True)
    engine.worker.deliver("d")
    engine.step()
    engine.schedule()
    engine.schedule()
    engine.abort("d")
    assert engine.num_free < engine.num_free_at_first
    engine.add("e", 10, PUSH | {"transfer_id": "u"})
    engine.schedule()
    old, new = opened(engine)
    assert not set(old.blocks[0]) & set(new.blocks[0])
    engine.run()
    engine.check_empty()


def test_a_new_request_with_the_id_of_one_that_was_given_up_is_not_called_off_with_it() -> None:
    engine = loading()
    engine.worker.deliver("d")
    engine.step()
    engine.abort("d")
    engine.add("d", 12, PUSH | {"transfer_id": "u"})
    handover = engine.step()
    assert [type(each) for each in handover.before_forward] == [DestinationOpened]
    assert list(engine.worker.loading) == ["d"]
    engine.run()
    assert engine.finish_reason("d") == LENGTH
    engine.check_empty()


def test_a_request_that_was_aborted_before_it_came_lets_the_prefill_side_go() -> None:
    """So vLLM's API server says that it rejected a request with a ticket (a template error, say)."""
    engine = Engine()
    engine.add("d", [0], PUSH)
    engine.abort("d")
    assert engine.step().before_forward == [NothingNeeded(ticket())]
    engine.check_empty()


# -- loads that fail -------------------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize(("policy", "reason", "num_tokens"), [("fail", ERROR, 0), ("recompute", LENGTH, 3)])
def test_a_failed_load_ends_as_the_policy_says(policy: Policy, reason: str, num_tokens: int, is_async: bool) -> None:
    engine = loading(policy=policy, is_async=is_async)
    engine.worker.fail("d")
    engine.step()
    engine.run()
    assert (engine.finish_reason("d"), engine.num_tokens("d")) == (reason, num_tokens)
    assert len(opened(engine)) == 1
    engine.check_empty()


@MODES
@pytest.mark.parametrize(("policy", "reason"), [("fail", ERROR), ("recompute", LENGTH)])
def test_an_invalid_ticket_is_a_load_that_fails(policy: Policy, reason: str, is_async: bool) -> None:
    engine = Engine(policy=policy, is_async=is_async)
    engine.add("d", 10, PUSH | {"remote_port": 0})
    engine.run()
    assert engine.finish_reason("d") == reason
    assert engine.commands == []
    engine.check_empty()


def test_an_invalid_ticket_given_up_at_once_is_still_reported_once() -> None:
    engine = Engine()
    engine.add("d", 10, PUSH | {"remote_port": 0})
    engine.schedule()
    engine.abort("d")
    engine.run()
    engine.check_empty()


@pytest.mark.parametrize("report", ["finished_recving", "finished_sending"])
def test_vllm_dies_of_a_report_of_an_unknown_request(report: str) -> None:
    """Why `WorkerSide.collect` drops such reports. If this changes, it need not."""
    engine = loading()
    engine.schedule()
    setattr(engine.worker.news, report, {"unknown"})
    with pytest.raises(AssertionError):
        engine.land()


# -- pressure --------------------------------------------------------------------------------------------------------


@MODES
def test_a_preempted_request_is_computed_again_and_never_waits_for_what_it_has_received(is_async: bool) -> None:
    engine = Engine(9, is_async=is_async)
    for name in ("a", "b"):
        engine.add(name, 10, PUSH | {"transfer_id": name}, max_tokens=12)
    engine.run()
    assert any(engine.preempted)
    for name in ("a", "b"):
        assert (engine.finish_reason(name), engine.num_tokens(name)) == (LENGTH, 12)
    assert len(engine.commands) == 2
    engine.check_empty()


@MODES
def test_a_request_that_waits_keeps_its_blocks_whatever_is_preempted(is_async: bool) -> None:
    engine = Engine(9, is_async=is_async)
    engine.add("plain", 8, max_tokens=20)
    engine.tick()
    engine.add("d", 10, PUSH)
    engine.tick()
    held = engine.blocks("d")
    for _ in range(40):
        engine.tick()
    assert engine.blocks("d") == held
    assert list(engine.worker.loading) == ["d"]
    engine.run()
    assert engine.finish_reason("d") == engine.finish_reason("plain") == LENGTH
    engine.check_empty()


@MODES
def test_more_loads_than_the_pool_holds_wait_their_turn(is_async: bool) -> None:
    """Waiting loads reserve all they will need, so that none of them blocks another for ever."""
    engine = Engine(8, is_async=is_async)
    names = [f"d{index}" for index in range(6)]
    for name in names:
        engine.add(name, 10, PUSH | {"transfer_id": name}, max_tokens=4)
    engine.tick()
    assert len(opened(engine)) == 2
    engine.run()
    assert [engine.finish_reason(name) for name in names] == [LENGTH] * 6
    assert [each.request_id for each in opened(engine)] == names
    engine.check_empty()


def test_a_load_is_not_admitted_into_blocks_that_a_running_prefill_will_need() -> None:
    engine = Engine(10)
    engine.add("plain", 30)
    engine.step()
    engine.add("d", 10, PUSH)
    engine.step()
    assert opened(engine) == []
    engine.run()
    assert engine.finish_reason("d") == LENGTH
    engine.check_empty()


def test_an_engine_that_speculates_does_not_start() -> None:
    """Look-ahead slots would be allocated on one side only."""
    config = make_config(20, "fail", "kv_both", is_async=False)
    config.speculative_config = SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_max=2)
    with pytest.raises(Unsupported, match="speculative"):
        KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, KVCacheConfig(20, [], cache_groups(0)))


def test_the_prefix_cache_can_be_reset_after_transfers_and_not_while_one_lands() -> None:
    engine = loading()
    assert not engine.scheduler.reset_prefix_cache()
    engine.run()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.check_empty()

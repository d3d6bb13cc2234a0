"""vLLM's scheduler on the prefill side: what is handed off was computed, and the pool is back where it started."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from kvbaton.router.legs import PrefillAnswer, read_prefill_answer
from kvbaton.runtime.events import SourceAdvanced, SourceFinished, SourceOpened
from kvbaton.types import RequestId, TransferId
from tests.host.rig import BLOCK_SIZE, CHUNK_TOKENS, STOP_TOKEN, Engine, of_type
from tests.host.tickets import PREFILL

LENGTH, STOP = "length", "stop"
T, P = TransferId("t"), RequestId("p")
MODES = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


def advances(engine: Engine) -> list[tuple[int, int, bool]]:
    return [(each.generation, each.num_tokens, each.is_last) for each in of_type(SourceAdvanced, engine.commands)]


def finished(*, is_held: bool, is_aborted: bool) -> SourceFinished:
    return SourceFinished(T, P, is_held=is_held, is_aborted=is_aborted)


@MODES
@pytest.mark.parametrize("num_tokens", range(1, BLOCK_SIZE + 2))
def test_a_prompt_of_any_length_is_handed_off(num_tokens: int, is_async: bool) -> None:
    engine = Engine(is_async=is_async)
    engine.add("p", num_tokens, PREFILL)
    handover = engine.schedule()
    blocks = engine.blocks("p")
    assert handover.before_forward == [SourceOpened(T, P)]
    assert handover.after_forward == [SourceAdvanced(T, P, 0, max(1, num_tokens - 1), is_last=True, blocks=blocks)]
    engine.run()
    assert engine.finish_reason("p") == LENGTH
    answer = engine.answer("p")
    assert answer is not None
    assert (answer["transfer_id"], answer["remote_num_tokens"]) == ("t", num_tokens)
    assert answer["remote_block_ids"] == [list(blocks[0])]
    assert engine.commands[2:] == [finished(is_held=True, is_aborted=False)]
    engine.check_empty()


@MODES
def test_who_only_asks_for_the_identity_is_answered_and_nothing_is_held(is_async: bool) -> None:
    engine = Engine(is_async=is_async)
    engine.add("p", 1, PREFILL | {"identity_only": True})
    engine.run()
    assert engine.finish_reason("p") == LENGTH
    answer = engine.answer("p")
    seen = read_prefill_answer(json.dumps({"kv_transfer_params": answer}).encode())
    assert isinstance(seen, PrefillAnswer)
    assert answer is not None
    assert not answer["do_remote_prefill"]
    assert engine.commands == []
    engine.check_empty()


@MODES
def test_who_leaves_before_the_identity_is_answered_leaves_nothing(is_async: bool) -> None:
    engine = Engine(is_async=is_async)
    engine.add("p", 2 * CHUNK_TOKENS, PREFILL | {"identity_only": True})
    engine.schedule()
    engine.abort("p")
    engine.run()
    assert engine.commands == []
    engine.check_empty()


@MODES
def test_every_chunk_is_told_with_the_step_that_computes_it(is_async: bool) -> None:
    """With async scheduling the next step is scheduled before this one has run: its KV is not spoken of in this one."""
    engine = Engine(is_async=is_async)
    engine.add("p", 2 * CHUNK_TOKENS + 5, PREFILL)
    told = [[(each.num_tokens, each.is_last) for each in engine.schedule().after_forward] for _ in range(3)]  # type: ignore[union-attr]
    assert told == [[(16, False)], [(32, False)], [(36, True)]]
    while engine.in_flight:
        engine.land()
    engine.run()
    assert of_type(SourceFinished, engine.handovers[2].after_forward) == []
    assert len(of_type(SourceFinished, engine.commands)) == 1
    engine.check_empty()


@MODES
def test_a_cached_prefix_is_handed_off_with_the_first_step(is_async: bool) -> None:
    engine = Engine(is_async=is_async)
    prompt = list(range(3 * CHUNK_TOKENS))
    engine.add("before", prompt)
    engine.run()
    engine.add("p", [*prompt, 1, 2], PREFILL)
    engine.run()
    assert advances(engine) == [(0, 3 * CHUNK_TOKENS + 1, True)]
    engine.check_empty()


@MODES
def test_a_stop_token_first_hands_off_all_the_same(is_async: bool) -> None:
    engine = Engine(is_async=is_async)
    engine.add("p", 10, PREFILL, max_tokens=5)
    engine.schedule()
    if is_async:
        engine.schedule()  # already under way when the token is known to be the last
    engine.land(p=STOP_TOKEN)
    assert engine.finish_reason("p") == STOP
    assert engine.answer("p") is not None
    engine.run()
    assert advances(engine) == [(0, 9, True)]
    assert of_type(SourceFinished, engine.commands) == [finished(is_held=True, is_aborted=False)]
    engine.check_empty()


@MODES
def test_a_router_that_forgets_to_clamp_gets_its_tokens_and_one_hand_off(is_async: bool) -> None:
    engine = Engine(is_async=is_async)
    engine.add("p", 10, PREFILL, max_tokens=6)
    engine.run()
    assert engine.num_tokens("p") == 6
    assert advances(engine) == [(0, 9, True)]
    engine.check_empty()


@MODES
def test_the_engine_keeps_stepping_until_held_blocks_are_given_back(is_async: bool) -> None:
    """Nothing else comes for the engine to do: vLLM's core steps on because a finished request is still in its books."""
    engine = Engine(is_async=is_async)
    engine.add("p", 10, PREFILL)
    for _ in range(50):
        engine.tick()
    assert engine.worker.held == {"p"}
    assert engine.num_free < engine.num_free_at_first
    assert engine.scheduler.has_requests()
    assert not engine.scheduler.has_unfinished_requests()
    assert not engine.scheduler.reset_prefix_cache()
    engine.worker.release("p")
    engine.run()
    engine.check_empty()


# -- clients that leave ----------------------------------------------------------------------------------------------


@MODES
def test_given_up_in_the_queue(is_async: bool) -> None:
    engine = Engine(is_async=is_async)
    engine.add("p", 10, PREFILL)
    engine.abort("p")
    handover = engine.step()
    assert handover.before_forward == [SourceOpened(T, P)]
    assert handover.after_forward == [finished(is_held=False, is_aborted=True)]
    engine.check_empty()


@pytest.mark.parametrize("num_landed", [0, 1, 2])
def test_given_up_while_it_computes_holds_the_blocks_until_the_worker_lets_go(num_landed: int) -> None:
    """At every point of a pipeline of two steps."""
    engine = Engine(is_async=True)
    engine.add("p", 3 * CHUNK_TOKENS, PREFILL)
    engine.schedule()
    engine.schedule()
    for _ in range(num_landed):
        engine.land()
    engine.abort("p")
    assert engine.num_free < engine.num_free_at_first
    handover = engine.schedule()
    assert handover.after_forward == [finished(is_held=True, is_aborted=True)]
    assert handover.preempted == []  # its blocks are still its own
    engine.run()
    assert advances(engine) == [(0, 16, False), (0, 32, False)]
    engine.check_empty()


def test_given_up_after_it_finished_changes_nothing() -> None:
    engine = Engine()
    engine.add("p", 10, PREFILL)
    engine.step()
    engine.abort("p")
    engine.run()
    assert of_type(SourceFinished, engine.commands) == [finished(is_held=True, is_aborted=False)]
    engine.check_empty()


# -- preemption ------------------------------------------------------------------------------------------------------


def contended(*, is_async: bool) -> Engine:
    """An old request grows into the pool and takes the blocks of the prefill behind it."""
    engine = Engine(9, is_async=is_async)
    engine.add("plain", 12, max_tokens=13)
    engine.tick()
    engine.add("p", 14, PREFILL, max_tokens=9)
    return engine


@MODES
def test_a_prefill_that_loses_its_blocks_is_computed_and_sent_again(is_async: bool) -> None:
    engine = contended(is_async=is_async)
    engine.run()
    assert engine.preempted == ["p"]
    assert advances(engine)[0][0] == 0
    assert advances(engine)[-1] == (1, 13, True)
    (revoked,) = [step for step in engine.handovers if step.preempted]
    assert revoked.preempted == [(T, P)]
    again = next(
        step
        for step in engine.handovers
        if any(each.generation for each in of_type(SourceAdvanced, step.after_forward))
    )
    assert engine.handovers.index(revoked) <= engine.handovers.index(again)
    assert (engine.finish_reason("p"), engine.num_tokens("p")) == (LENGTH, 9)
    assert of_type(SourceFinished, engine.commands) == [finished(is_held=True, is_aborted=False)]
    engine.check_empty()


@pytest.mark.parametrize("num_landed", [0, 1])
@MODES
def test_preempted_in_the_middle_of_its_prompt(num_landed: int, is_async: bool) -> None:
    engine = Engine(is_async=is_async)
    engine.add("p", 40, PREFILL)
    engine.schedule()
    if num_landed or not is_async:
        engine.land()
    engine.preempt_all()
    assert engine.schedule().preempted == [(T, P)]
    while engine.in_flight:
        engine.land()
    engine.run()
    first, *again = advances(engine)
    assert first == (0, 16, False)
    # What a step in flight computes is in the prefix cache already, and right: that step runs before the next.
    assert again in ([(1, 16, False), (1, 32, False), (1, 39, True)], [(1, 32, False), (1, 39, True)])
    assert engine.num_tokens("p") == 1
    engine.check_empty()


def test_preempted_with_its_last_chunk_in_flight_is_computed_again_before_it_finishes() -> None:
    """Its token is dropped: finishing now would hand off blocks that the preemption gave away."""
    engine = Engine(is_async=True)
    engine.add("p", 10, PREFILL)
    engine.schedule()
    engine.preempt_all()
    engine.schedule()
    engine.land()
    assert engine.finish_reason("p") is None
    engine.run()
    assert engine.finish_reason("p") == LENGTH
    assert engine.num_tokens("p") == 1
    assert advances(engine) == [(0, 9, True), (1, 9, True)]
    engine.check_empty()


def test_preempted_and_given_up_before_the_next_step_is_not_read_any_more() -> None:
    engine = Engine()
    engine.add("p", 40, PREFILL)
    engine.step()
    engine.preempt_all()
    engine.abort("p")
    engine.add("next", 10)
    handover = engine.step()
    assert handover.preempted == [(T, P)]
    assert handover.after_forward == [finished(is_held=True, is_aborted=True)]
    engine.run()
    engine.check_empty()


# -- strange requests ------------------------------------------------------------------------------------------------


@MODES
def test_several_choices_on_the_prefill_side_pin_nothing(is_async: bool) -> None:
    """A router that forgot to clamp `n`: the worker hears of all, hands one off and lets all go."""
    engine = Engine(is_async=is_async)
    prompt = list(range(10))
    for index in range(3):
        engine.add(f"{index}_p", prompt, PREFILL)
    engine.run()
    ends = of_type(SourceFinished, engine.commands)
    assert [(each.transfer_id, each.request_id, each.is_held) for each in ends] == [
        (T, f"{i}_p", True) for i in range(3)
    ]
    assert [engine.finish_reason(f"{index}_p") for index in range(3)] == [LENGTH] * 3
    engine.check_empty()


@MODES
def test_an_invalid_ticket_is_answered_and_holds_nothing(is_async: bool) -> None:
    engine = Engine(is_async=is_async)
    engine.add("p", 10, PREFILL | {"transfer_id": 7})
    engine.run()
    assert engine.commands == []
    answer = engine.answer("p")
    assert answer is not None
    assert "transfer_id" in str(answer["error"])
    engine.check_empty()


def test_the_id_of_a_request_that_is_over_can_be_used_again() -> None:
    engine = Engine()
    for transfer_id in ("t", "u"):
        engine.add("p", 10, PREFILL | {"transfer_id": transfer_id})
        engine.run()
    assert [each.transfer_id for each in of_type(SourceFinished, engine.commands)] == ["t", "u"]

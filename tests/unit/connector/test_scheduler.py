"""The scheduler side: tokens to expect, what to tell the worker each step, what to hold and to answer."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from kvbaton.connector.handover import RankAddress, StepHandover
from kvbaton.connector.scheduler import Role, SchedulerSide
from kvbaton.connector.settings import ConnectorSettings
from kvbaton.protocol.params import DecodeTicket, PrefillIdentity
from kvbaton.runtime.events import (
    DestinationCancelled,
    DestinationOpened,
    NothingNeeded,
    SourceAdvanced,
    SourceFinished,
    SourceOpened,
)
from kvbaton.types import Direction, EngineId, RequestId, TransferId
from tests.unit.connector.fakes import output, request

P, D = RequestId("p"), RequestId("d")
T = TransferId("t")
BLOCKS = ((1, 2, 3),)
PREFILL: dict[str, object] = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t"}
DECODE: dict[str, object] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "transfer_id": "t",
    "remote_engine_id": "engine p",
    "remote_host": "127.0.0.1",
    "remote_port": 5555,
}
TICKET = DecodeTicket(T, EngineId("engine p"), "127.0.0.1", 5555, 1, 1, Direction.PUSH)


def side(role: Role = "kv_both", **changed: object) -> SchedulerSide:
    identity = PrefillIdentity(engine_id=EngineId("engine"), host="127.0.0.1", port=0, tp_size=1, pp_size=1)
    made = SchedulerSide(msgspec.structs.replace(ConnectorSettings(), **changed), identity, role)
    made.set_address(RankAddress("127.0.0.1", 5555))
    return made


def step(scheduler: SchedulerSide, **scheduled: object) -> StepHandover:
    return scheduler.step(output(**scheduled), lambda _request_id: BLOCKS)  # type: ignore[arg-type]


def advanced(num_tokens: int, *, last: bool, generation: int = 0) -> SourceAdvanced:
    return SourceAdvanced(T, P, generation, num_tokens, last, BLOCKS)


def test_requests_without_params_are_nobodys() -> None:
    scheduler = side()
    scheduler.new_request(request("plain", 40))
    assert scheduler.num_expected_tokens(request("plain", 40), 0) == 0
    scheduler.blocks_allocated(request("plain", 40), BLOCKS, 0)
    assert step(scheduler, new={"plain": (0, 40)}) == StepHandover(num_scheduled_tokens=40)
    assert scheduler.finished(request("plain", 40), ([1],), is_aborted=False) == (False, None)


def test_params_that_ask_for_nothing_are_nobodys() -> None:
    scheduler = side()
    scheduler.new_request(request("plain", 40, do_remote_decode=False))
    assert step(scheduler, new={"plain": (0, 40)}) == StepHandover(num_scheduled_tokens=40)


# -- prefill ---------------------------------------------------------------------------------------------------------


def test_a_prefill_in_one_step() -> None:
    scheduler = side()
    scheduler.new_request(request(P, 40, **PREFILL))
    assert scheduler.num_expected_tokens(request(P, 40, **PREFILL), 0) == 0
    scheduler.blocks_allocated(request(P, 40, **PREFILL), BLOCKS, 0)
    handover = step(scheduler, new={P: (0, 40)})
    assert handover.before_forward == [SourceOpened(T, P)]
    assert handover.after_forward == [advanced(39, last=True)]

    is_held, answer = scheduler.finished(request(P, 40, **PREFILL), ([1, 2, 3],), is_aborted=False)
    assert is_held
    assert answer is not None
    assert {key: answer[key] for key in ("remote_engine_id", "remote_port", "remote_block_ids", "transfer_id")} == {
        "remote_engine_id": "engine",
        "remote_port": 5555,
        "remote_block_ids": [[1, 2, 3]],
        "transfer_id": "t",
    }
    handover = step(scheduler)
    assert handover == StepHandover(after_forward=[SourceFinished(T, P, is_held=True, is_aborted=False)])
    assert step(scheduler) == StepHandover()


def test_every_chunk_is_told_and_nothing_beyond_the_prompt() -> None:
    scheduler = side()
    scheduler.new_request(request(P, 40, **PREFILL))
    told = [step(scheduler, new={P: (8, 8)}).after_forward]  # 8 tokens were cached
    told += [step(scheduler, cached={P: (start, num)}).after_forward for start, num in ((16, 16), (32, 9), (41, 1))]
    assert told == [[advanced(16, last=False)], [advanced(32, last=False)], [advanced(39, last=True)], []]


def test_without_streaming_only_the_whole_prompt_is_told() -> None:
    scheduler = side(is_streaming=False)
    scheduler.new_request(request(P, 40, **PREFILL))
    assert step(scheduler, new={P: (0, 16)}).after_forward == []
    assert step(scheduler, cached={P: (16, 24)}).after_forward == [advanced(39, last=True)]


def test_a_step_whose_blocks_are_not_known_is_told_with_the_next() -> None:
    scheduler = side()
    scheduler.new_request(request(P, 40, **PREFILL))
    assert scheduler.step(output(new={P: (0, 16)}), lambda _request_id: None).after_forward == []
    assert step(scheduler, cached={P: (16, 8)}).after_forward == [advanced(24, last=False)]


def test_a_preempted_prefill_starts_a_new_generation() -> None:
    scheduler = side()
    scheduler.new_request(request(P, 40, **PREFILL))
    step(scheduler, new={P: (0, 16)})
    handover = step(scheduler, preempted={P, "somebody else"})
    assert handover.preempted == [(T, P)]
    handover = step(scheduler, cached={P: (0, 40)})
    assert handover.preempted == []
    assert handover.after_forward == [advanced(39, last=True, generation=1)]


@pytest.mark.parametrize("was_scheduled", [False, True])
def test_an_aborted_prefill_holds_blocks_only_if_it_had_any(was_scheduled: bool) -> None:
    scheduler = side()
    scheduler.new_request(request(P, 40, **PREFILL))
    if was_scheduled:
        step(scheduler, new={P: (0, 16)})
    assert scheduler.finished(request(P, 40, **PREFILL), ([1],), is_aborted=True) == (was_scheduled, None)
    assert step(scheduler).after_forward == [SourceFinished(T, P, is_held=was_scheduled, is_aborted=True)]


def test_blocks_lost_since_the_last_step_are_not_read_in_the_next() -> None:
    """Found: preempted by a cache reset and aborted before the next step, whose handover then did not speak of it."""
    scheduler = side()
    scheduler.new_request(request(P, 40, **PREFILL))
    step(scheduler, new={P: (0, 16)})
    scheduler.finished(request(P, 40, **PREFILL), ([],), is_aborted=True)
    handover = step(scheduler, preempted={P})
    assert handover.preempted == [(T, P)]
    assert handover.after_forward == [SourceFinished(T, P, is_held=True, is_aborted=True)]


def test_a_prefill_that_lost_its_blocks_hands_nothing_off_however_it_finished() -> None:
    scheduler = side()
    scheduler.new_request(request(P, 40, **PREFILL))
    step(scheduler, new={P: (0, 40)})
    step(scheduler, preempted={P})
    assert scheduler.finished(request(P, 40, **PREFILL), ([],), is_aborted=False) == (True, None)
    assert step(scheduler).after_forward == [SourceFinished(T, P, is_held=True, is_aborted=True)]


def test_an_invalid_prefill_is_answered_with_what_is_wrong_and_holds_nothing() -> None:
    scheduler = side()
    bad = request(P, 40, **(PREFILL | {"transfer_id": 7}))
    scheduler.new_request(bad)
    assert scheduler.num_expected_tokens(bad, 0) == 0
    assert step(scheduler, new={P: (0, 40)}) == StepHandover(num_scheduled_tokens=40)
    is_held, answer = scheduler.finished(bad, ([1],), is_aborted=False)
    assert not is_held
    assert answer is not None
    assert "transfer_id" in str(answer["error"])


# -- decode ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_computed", [0, 16])
def test_a_decode_request_expects_what_it_does_not_hold(num_computed: int) -> None:
    scheduler = side()
    wanted = request(D, 40, **DECODE)
    scheduler.new_request(wanted)
    assert scheduler.num_expected_tokens(wanted, num_computed) == 39 - num_computed
    assert scheduler.num_expected_tokens(wanted, num_computed) == 39 - num_computed  # no side effects
    scheduler.blocks_allocated(wanted, BLOCKS, 39 - num_computed)
    assert step(scheduler).before_forward == [DestinationOpened(TICKET, D, num_computed, 39, BLOCKS)]
    # What was asked for once is not asked for again.
    assert scheduler.num_expected_tokens(wanted, num_computed) == 0
    scheduler.blocks_allocated(wanted, BLOCKS, 0)
    scheduler.loads_ended([D, "somebody else"], ())
    assert scheduler.num_expected_tokens(wanted, 0) == 0  # recomputed or preempted: never a second load
    assert step(scheduler, new={D: (39, 1)}) == StepHandover(num_scheduled_tokens=1)
    assert scheduler.finished(wanted, ([1],), is_aborted=False) == (False, None)
    assert step(scheduler) == StepHandover()


@pytest.mark.parametrize("num_computed", [39, 40])
def test_a_decode_request_that_needs_nothing_says_so(num_computed: int) -> None:
    """Found: a prompt of which only the last token was missing, which is computed here anyway, waited for a transfer."""
    scheduler = side()
    wanted = request(D, 40, **DECODE)
    scheduler.new_request(wanted)
    assert scheduler.num_expected_tokens(wanted, num_computed) == 0
    scheduler.blocks_allocated(wanted, BLOCKS, 0)
    assert step(scheduler).before_forward == [NothingNeeded(TICKET)]
    scheduler.finished(wanted, ([1],), is_aborted=False)
    assert step(scheduler) == StepHandover()  # said once


def test_a_decode_request_given_up_in_the_queue_frees_the_prefill_side() -> None:
    scheduler = side()
    scheduler.new_request(request(D, 40, **DECODE))
    assert scheduler.finished(request(D, 40, **DECODE), ([],), is_aborted=True) == (False, None)
    assert step(scheduler).before_forward == [NothingNeeded(TICKET)]


def test_a_decode_request_given_up_while_it_loads_is_called_off_by_name() -> None:
    """Found: the worker took it from vLLM's list of finished ids, and called off a new request with the id of an old one."""
    scheduler = side()
    wanted = request(D, 40, **DECODE)
    scheduler.new_request(wanted)
    scheduler.blocks_allocated(wanted, BLOCKS, 39)
    step(scheduler)
    assert scheduler.finished(wanted, ([1],), is_aborted=True) == (False, None)
    assert step(scheduler).before_forward == [DestinationCancelled(D)]
    scheduler.loads_ended([D], {D})
    assert len(scheduler._shared) == 0


def test_a_load_that_failed_on_one_rank_is_called_off_on_all() -> None:
    """Found: the other ranks went on waiting for a prefill engine of which one process hung."""
    scheduler = side()
    wanted = request(D, 40, **DECODE)
    scheduler.new_request(wanted)
    scheduler.blocks_allocated(wanted, BLOCKS, 39)
    step(scheduler)
    scheduler.loads_failed_somewhere([D, RequestId("nobody's")])
    assert step(scheduler).before_forward == [DestinationCancelled(D)]
    scheduler.loads_ended([D], {D})
    scheduler.loads_failed_somewhere([D])  # of a rank that was the last
    assert step(scheduler) == StepHandover()


# -- several requests with one ticket --------------------------------------------------------------------------------

SIBLINGS = [request(f"{index}_d", 40, **DECODE) for index in range(3)]


def siblings() -> SchedulerSide:
    scheduler = side()
    for each in SIBLINGS:
        scheduler.new_request(each)
    scheduler.blocks_allocated(SIBLINGS[0], BLOCKS, 39)
    assert [type(command) for command in step(scheduler).before_forward] == [DestinationOpened]
    assert [scheduler.num_expected_tokens(each, 0) for each in SIBLINGS] == [0, None, None]
    return scheduler


def test_requests_with_one_ticket_wait_for_the_first_and_then_load_nothing() -> None:
    scheduler = siblings()
    scheduler.loads_ended(["0_d"], ())
    for each in SIBLINGS[1:]:
        assert scheduler.num_expected_tokens(each, 32) == 0
        scheduler.blocks_allocated(each, BLOCKS, 0)
    for each in SIBLINGS:
        scheduler.finished(each, ([1],), is_aborted=False)
    assert step(scheduler) == StepHandover()
    assert len(scheduler._shared) == 0


@pytest.mark.parametrize("is_given_up", [False, True])
def test_after_a_failed_load_the_next_request_with_the_ticket_tries_itself(is_given_up: bool) -> None:
    scheduler = siblings()
    if is_given_up:
        scheduler.finished(SIBLINGS[0], ([1],), is_aborted=True)
        assert step(scheduler).before_forward == [DestinationCancelled(RequestId("0_d"))]
        assert scheduler.num_expected_tokens(SIBLINGS[1], 0) is None  # its blocks are not at rest yet
    scheduler.loads_ended(["0_d"], {"0_d"})
    assert [scheduler.num_expected_tokens(each, 0) for each in SIBLINGS[1:]] == [39, 39]
    scheduler.blocks_allocated(SIBLINGS[2], BLOCKS, 39)
    assert [scheduler.num_expected_tokens(each, 0) for each in SIBLINGS[1:]] == [None, 0]
    for each in SIBLINGS:
        scheduler.finished(each, ([1],), is_aborted=True)
    assert step(scheduler).before_forward[1:] == [DestinationCancelled(RequestId("2_d"))]
    scheduler.loads_ended(["2_d"], {"2_d"})
    assert len(scheduler._shared) == 0


def test_what_was_delivered_to_a_request_that_left_is_computed_by_the_others() -> None:
    scheduler = siblings()
    scheduler.finished(SIBLINGS[0], ([1],), is_aborted=True)
    scheduler.loads_ended(["0_d"], ())
    assert scheduler.num_expected_tokens(SIBLINGS[1], 0) == 0


def test_one_of_several_that_is_given_up_does_not_take_the_kv_from_the_others() -> None:
    """Found: a request given up in the queue told the prefill side that nothing is needed, while another wanted it."""
    scheduler = side()
    for each in SIBLINGS[:2]:
        scheduler.new_request(each)
    scheduler.finished(SIBLINGS[0], ([],), is_aborted=True)
    assert step(scheduler) == StepHandover()
    assert scheduler.num_expected_tokens(SIBLINGS[1], 0) == 39
    scheduler.finished(SIBLINGS[1], ([],), is_aborted=True)
    assert step(scheduler).before_forward == [NothingNeeded(TICKET)]
    assert len(scheduler._shared) == 0


def test_that_nothing_is_needed_is_said_once_for_all() -> None:
    scheduler = side()
    for each in SIBLINGS:
        scheduler.new_request(each)
        scheduler.blocks_allocated(each, BLOCKS, 0)
    assert step(scheduler).before_forward == [NothingNeeded(TICKET)]


# -- roles and bad params --------------------------------------------------------------------------------------------


def test_an_engine_does_not_play_the_other_role() -> None:
    """Found: vLLM guards a hand-off against preemption, and a load against late writes, only for the role it was told."""
    consumer = side("kv_consumer")
    consumer.new_request(request(P, 40, **PREFILL))
    assert step(consumer, new={P: (0, 40)}) == StepHandover(num_scheduled_tokens=40)
    is_held, answer = consumer.finished(request(P, 40, **PREFILL), ([1],), is_aborted=False)
    assert not is_held
    assert answer is not None
    assert "kv_consumer" in str(answer["error"])

    producer = side("kv_producer")
    producer.new_request(request(D, 40, **DECODE))
    producer.blocks_allocated(request(D, 40, **DECODE), BLOCKS, 1)
    assert "kv_producer" in step(producer).rejected[D]


def test_an_invalid_decode_request_is_a_load_that_fails() -> None:
    scheduler = side()
    bad = request(D, 40, **(DECODE | {"remote_port": 0}))
    scheduler.new_request(bad)
    assert scheduler.num_expected_tokens(bad, 0) == 1
    scheduler.blocks_allocated(bad, BLOCKS, 1)
    handover = step(scheduler)
    assert list(handover.rejected) == [D]
    assert "remote_port" in handover.rejected[D]
    assert handover.before_forward == []
    assert scheduler.num_expected_tokens(bad, 0) == 0  # then it is recomputed, or failed: vLLM's policy
    scheduler.loads_ended([D], {D})
    assert scheduler.finished(bad, ([1],), is_aborted=True) == (False, None)
    assert step(scheduler) == StepHandover()


def test_nothing_a_client_sends_raises() -> None:
    """Found: half a surrogate pair where a truth value belongs raised in the scheduler, and the engine died."""
    scheduler = side()
    nonsense: list[dict[str, object]] = [
        {"do_remote_prefill": "\ud800"},
        DECODE | {"transfer_id": "\udfff"},
        {"do_remote_decode": [[[]]]},
    ]
    for params in nonsense:
        scheduler.new_request(request(D, 40, **params))
        scheduler.num_expected_tokens(request(D, 40, **params), 0)
        scheduler.finished(request(D, 40, **params), ([],), is_aborted=True)


def test_the_timeline_has_the_schedulers_events(tmp_path: Path) -> None:
    scheduler = side(trace_path=str(tmp_path / "trace-{rank}.jsonl"))
    scheduler.new_request(request(P, 40, **PREFILL))
    scheduler.new_request(request(D, 40, **DECODE))
    scheduler.blocks_allocated(request(D, 40, **DECODE), BLOCKS, 0)
    step(scheduler, new={P: (0, 40), D: (39, 1)})
    step(scheduler, cached={P: (40, 1), D: (40, 1)})
    scheduler.shutdown()
    lines = [json.loads(line) for line in (tmp_path / "trace-0.jsonl").read_text().splitlines()]
    assert [(line["who"], line["event"], line["transfer_id"]) for line in lines] == [
        ("prefill", "queued", "t"),
        ("decode", "queued", "t"),
        ("decode", "nothing_needed", "t"),
        ("prefill", "prefill_started", "t"),
        ("decode", "decode_started", "t"),
    ]

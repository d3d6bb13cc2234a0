"""The scheduler side: which tokens to expect, which blocks to hold, and what to tell the worker each step.

Invariant: nothing here raises on a request's params. An invalid ticket fails that request alone: on the decode side as a
failed load, on the prefill side as an answer that says so. Every call is O(what changed). Next: worker.py.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from kvbaton.connector.handover import RankAddress, StepHandover
from kvbaton.connector.pins import Block, BlockPool, WindowPins
from kvbaton.connector.settings import ConnectorSettings
from kvbaton.connector.sharing import SharedTickets
from kvbaton.errors import InvalidParams
from kvbaton.protocol.params import (
    DecodeTicket,
    PrefillIdentity,
    PrefillTicket,
    identity_answer,
    parse_params,
    prefill_answer,
)
from kvbaton.runtime.events import (
    BlockLists,
    DestinationCancelled,
    DestinationOpened,
    NothingNeeded,
    SourceAdvanced,
    SourceFinished,
    SourceOpened,
)
from kvbaton.runtime.trace import Trace
from kvbaton.types import RequestId

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvbaton")


class Stage(enum.Enum):
    """How far a decode request is with its transfer."""

    NEW = "new"
    LOADING = "loading"
    OVER = "over"


@dataclass
class PrefillRequest:
    ticket: PrefillTicket
    num_prompt_tokens: int
    num_handed_tokens: int
    generation: int = 0
    num_final_tokens: int = 0
    was_scheduled: bool = False


@dataclass
class DecodeRequest:
    ticket: DecodeTicket
    stage: Stage = Stage.NEW
    was_started: bool = False


@dataclass
class RejectedRequest:
    """Its params are invalid: it is to fail with `reason`."""

    reason: str
    is_decode: bool
    stage: Stage = Stage.NEW


@dataclass
class IdentityRequest:
    """It hands nothing off: its answer says who this engine is."""


Tracked = PrefillRequest | DecodeRequest | RejectedRequest | IdentityRequest

Role: TypeAlias = Literal["kv_both", "kv_producer", "kv_consumer"]


def _num_handed_tokens(request: Request) -> int:
    """What travels of a prompt: all but its last token, which the decode side computes in any case to sample the next.

    Told that it has that token too, vLLM gives up the block that holds the oldest token of that token's sliding window.
    """
    return max(1, int(request.num_prompt_tokens) - 1)


class SchedulerSide:
    def __init__(self, settings: ConnectorSettings, identity: PrefillIdentity, role: Role = "kv_both") -> None:
        self._settings = settings
        self._identity = identity
        self._role = role
        self._requests: dict[RequestId, Tracked] = {}
        self._shared = SharedTickets()
        self._pins: WindowPins[Any] | None = None
        self._handover = StepHandover()
        path = settings.trace_path
        self._prefill_trace = Trace(path and path.replace("{rank}", "0"), "prefill")
        self._decode_trace = Trace(path and path.replace("{rank}", "0"), "decode")

    def set_address(self, address: RankAddress) -> None:
        """Where rank 0 really listens."""
        self._identity = msgspec.structs.replace(self._identity, host=address.host, port=address.port)

    def pin_in(self, pool: BlockPool[Block], windowed_groups: Sequence[int], max_steps_in_flight: int) -> None:
        """Keep the window blocks of hand-offs in `pool`. Never called where no cache group has a window."""
        self._pins = WindowPins(pool, windowed_groups, max_steps_in_flight)

    def new_request(self, request: Request) -> None:
        params = request.kv_transfer_params
        if not params:
            return
        request_id = RequestId(request.request_id)
        try:
            ticket = parse_params(params, request_id)
            self._refuse_wrong_role(ticket)
        except InvalidParams as error:
            logger.warning("Request %s: %s", request_id, error)
            self._requests[request_id] = RejectedRequest(str(error), bool(params.get("do_remote_prefill")))
            return
        if isinstance(ticket, PrefillTicket) and ticket.is_identity_only:
            self._requests[request_id] = IdentityRequest()
        elif isinstance(ticket, PrefillTicket):
            self._requests[request_id] = PrefillRequest(ticket, request.num_prompt_tokens, _num_handed_tokens(request))
            self._handover.before_forward.append(SourceOpened(ticket.transfer_id, request_id))
            self._prefill_trace.emit("queued", ticket.transfer_id, request_id=request_id)
        elif isinstance(ticket, DecodeTicket):
            self._requests[request_id] = DecodeRequest(ticket)
            self._shared.join(ticket, request_id)
            self._decode_trace.emit("queued", ticket.transfer_id, request_id=request_id)

    def _refuse_wrong_role(self, ticket: PrefillTicket | DecodeTicket | None) -> None:
        """Raises InvalidParams. Only for a producer does vLLM compute again what a preemption took from a hand-off, and
        only for a consumer does it keep blocks back that a step in flight still writes: the other role would corrupt KV.
        """
        if isinstance(ticket, PrefillTicket) and self._role == "kv_consumer":
            raise InvalidParams(
                "kv_transfer_params: do_remote_decode is true, but this engine's kv_role is kv_consumer"
            )
        if isinstance(ticket, DecodeTicket) and self._role == "kv_producer":
            raise InvalidParams(
                "kv_transfer_params: do_remote_prefill is true, but this engine's kv_role is kv_producer"
            )

    def num_expected_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Tokens of the prompt that will come from the prefill side, beyond those computed here. No side effects.

        None: another request with the same ticket loads them; ask again when it has.
        """
        tracked = self._requests.get(RequestId(request.request_id))
        if isinstance(tracked, RejectedRequest) and tracked.is_decode and tracked.stage is Stage.NEW:
            return 1  # the least that makes it a load, which is then failed
        if not isinstance(tracked, DecodeRequest) or tracked.stage is not Stage.NEW:
            return 0
        num_missing = int(request.num_prompt_tokens) - 1 - num_computed_tokens
        if num_missing <= 0 or self._shared.is_settled(tracked.ticket):
            return 0
        return None if self._shared.is_loading(tracked.ticket) else num_missing

    def blocks_allocated(self, request: Request, blocks: BlockLists, num_external_tokens: int) -> None:
        request_id = RequestId(request.request_id)
        tracked = self._requests.get(request_id)
        if isinstance(tracked, RejectedRequest) and tracked.is_decode and tracked.stage is Stage.NEW:
            tracked.stage = Stage.OVER
            if num_external_tokens:
                self._handover.rejected[request_id] = tracked.reason
        elif isinstance(tracked, DecodeRequest) and tracked.stage is Stage.NEW:
            if num_external_tokens == 0:
                tracked.stage = Stage.OVER
                self._decode_trace.emit("nothing_needed", tracked.ticket.transfer_id, request_id=request_id)
                if self._shared.settle(tracked.ticket):
                    self._handover.before_forward.append(NothingNeeded(tracked.ticket))
                return
            tracked.stage = Stage.LOADING
            self._shared.start(tracked.ticket, request_id)
            self._handover.before_forward.append(
                DestinationOpened(
                    ticket=tracked.ticket,
                    request_id=request_id,
                    first_token=_num_handed_tokens(request) - num_external_tokens,
                    num_tokens=_num_handed_tokens(request),
                    blocks=blocks,
                )
            )

    def step(self, output: SchedulerOutput, blocks_of: Callable[[str], BlockLists | None]) -> StepHandover:
        """What the worker needs to know of this step. Resets the collection for the next one."""
        if self._pins is not None:
            self._pins.step()
        preempted = output.preempted_req_ids or set()
        for request_id in preempted:
            self._preempted(RequestId(request_id))
        if self._requests:
            scheduled = output.num_scheduled_tokens
            for new in output.scheduled_new_reqs:
                self._scheduled(RequestId(new.req_id), new.num_computed_tokens + scheduled[new.req_id], blocks_of)
            cached = output.scheduled_cached_reqs
            for request_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                self._scheduled(RequestId(request_id), num_computed + scheduled[request_id], blocks_of)
        handover, self._handover = self._handover, StepHandover()
        handover.num_scheduled_tokens = output.total_num_scheduled_tokens
        return handover

    def _preempted(self, request_id: RequestId) -> None:
        """A prefill that lost its blocks starts a new generation: what was sent is sent again."""
        tracked = self._requests.get(request_id)
        if isinstance(tracked, PrefillRequest):
            tracked.generation += 1
            tracked.num_final_tokens = 0
            self._handover.preempted.append((tracked.ticket.transfer_id, request_id))
            if self._pins is not None:
                self._pins.lose(request_id)

    def _scheduled(self, request_id: RequestId, num_tokens: int, blocks_of: Callable[[str], BlockLists | None]) -> None:
        """After this step's forward, the first `num_tokens` of the request have KV."""
        tracked = self._requests.get(request_id)
        if isinstance(tracked, DecodeRequest) and not tracked.was_started:
            tracked.was_started = True
            self._decode_trace.emit("decode_started", tracked.ticket.transfer_id)
        if not isinstance(tracked, PrefillRequest):
            return
        if not tracked.was_scheduled:
            tracked.was_scheduled = True
            self._prefill_trace.emit("prefill_started", tracked.ticket.transfer_id)
        num_final = min(num_tokens, tracked.num_handed_tokens)
        is_last = num_final == tracked.num_handed_tokens
        is_worth_telling = is_last or self._settings.is_streaming
        blocks = blocks_of(request_id) if num_final > tracked.num_final_tokens and is_worth_telling else None
        if blocks is None:
            return
        tracked.num_final_tokens = num_final
        if is_last and self._pins is not None:
            self._pins.pin(request_id, blocks)
        self._handover.after_forward.append(
            SourceAdvanced(
                transfer_id=tracked.ticket.transfer_id,
                request_id=request_id,
                generation=tracked.generation,
                num_tokens=num_final,
                is_last=is_last,
                blocks=blocks,
            )
        )

    def finished(
        self, request: Request, blocks: tuple[list[int], ...], *, is_aborted: bool
    ) -> tuple[bool, dict[str, object] | None]:
        """(the blocks must be kept until the worker reports the request, what to answer over HTTP)."""
        request_id = RequestId(request.request_id)
        tracked = self._requests.pop(request_id, None)
        if isinstance(tracked, RejectedRequest) and not tracked.is_decode:
            return False, {"error": tracked.reason}
        if isinstance(tracked, IdentityRequest):
            return False, None if is_aborted else identity_answer(self._identity)
        if isinstance(tracked, DecodeRequest):
            self._decode_finished(tracked, request_id)
        if not isinstance(tracked, PrefillRequest):
            return False, None
        is_held = tracked.was_scheduled
        if is_held and not any(blocks):
            # Preempted, perhaps since the last step, which is then not told of it: nothing may be read any more.
            self._handover.preempted.append((tracked.ticket.transfer_id, request_id))
        is_aborted = is_aborted or tracked.num_final_tokens < tracked.num_handed_tokens
        command = SourceFinished(tracked.ticket.transfer_id, request_id, is_held=is_held, is_aborted=is_aborted)
        self._handover.after_forward.append(command)
        if is_aborted:
            return is_held, None
        answer = prefill_answer(tracked.ticket, self._identity, request_id, blocks, tracked.num_prompt_tokens)
        return is_held, answer

    def _decode_finished(self, tracked: DecodeRequest, request_id: RequestId) -> None:
        """What is on its way to its blocks is called off; where nothing was asked for, the prefill side need not wait."""
        is_untouched = self._shared.leave(tracked.ticket, request_id)
        if tracked.stage is Stage.LOADING:
            self._handover.before_forward.append(DestinationCancelled(request_id))
        elif tracked.stage is Stage.NEW and is_untouched:
            self._handover.before_forward.append(NothingNeeded(tracked.ticket))

    def loads_ended(self, request_ids: Iterable[str], failed: Container[str]) -> None:
        """The worker is done with these loads, well or, those in `failed`, badly."""
        for each in request_ids:
            request_id = RequestId(each)
            self._shared.end(request_id, failed)
            tracked = self._requests.get(request_id)
            if isinstance(tracked, DecodeRequest):
                tracked.stage = Stage.OVER

    def loads_failed_somewhere(self, request_ids: Iterable[RequestId]) -> None:
        """One rank said so; the others are told, who might wait long for KV that nobody will use."""
        for request_id in request_ids:
            tracked = self._requests.get(request_id)
            if isinstance(tracked, DecodeRequest) and tracked.stage is Stage.LOADING:
                self._handover.before_forward.append(DestinationCancelled(request_id))

    @property
    def is_waiting_for_steps(self) -> bool:
        """Blocks come free with the next steps, also if there is nothing else to do."""
        return self._pins is not None and self._pins.has_lost

    def sends_ended(self, request_ids: Iterable[str]) -> None:
        """The worker is done with these hand-offs."""
        if self._pins is not None:
            for request_id in request_ids:
                self._pins.release(RequestId(request_id))

    def shutdown(self) -> None:
        self._prefill_trace.close()
        self._decode_trace.close()

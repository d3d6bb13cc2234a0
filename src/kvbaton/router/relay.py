"""One routed request in the shell: runs the legs, feeds `flow.step`, performs its effects.

Invariant: every leg is a task of one group, so whatever ends the request ends its legs and closes their connections.
Only the pump (`_pump`) changes state; legs post what happened, marked with their dispatch, and what comes late is
dropped. D's leg writes a stream to the client itself, once committed: no queue and no task switch between an engine's
bytes and the client. Read next: `app.py`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from kvbaton.router.answers import Answer, LegFailure, Side, lost_answer, lost_event
from kvbaton.router.client import Client
from kvbaton.router.counters import Counters, RequestOutcome
from kvbaton.router.flow import Effect, Input, Route, State, begin, judge_prefill, step
from kvbaton.router.legs import Identity, Ticket, decode_body, prefill_body, push_params
from kvbaton.router.pool import Instance, Pool, new_ticket
from kvbaton.router.request import ClientRequest
from kvbaton.router.trace import Trace
from kvbaton.router.upstream import DecodeStream, Upstream


@dataclass(frozen=True, slots=True)
class Services:
    """What every request shares."""

    pool: Pool
    upstream: Upstream
    counters: Counters
    trace: Trace


@dataclass(frozen=True, slots=True)
class Job:
    """One request and the instances chosen for it. `prefill` is None exactly when the route is DECODE_ONLY."""

    request: ClientRequest
    route: Route
    prefill: Instance | None
    decode: Instance


@dataclass(frozen=True, slots=True)
class Happened:
    what: Input
    side: Side
    dispatch: int
    detail: Answer | LegFailure | None = None


_OUTCOMES = {
    Effect.FINISH: RequestOutcome.DELIVERED,
    Effect.ABANDON: RequestOutcome.CLIENT_GONE,
    Effect.PASS_ON_ERROR: RequestOutcome.ENGINE_ERROR,
    Effect.REPORT_LOSS: RequestOutcome.ENGINE_LOST,
    Effect.BREAK_STREAM: RequestOutcome.BROKEN_STREAM,
}


class Exchange:
    """The life of one request after a pair was chosen. Use once: `await run()`."""

    def __init__(self, services: Services, job: Job, client: Client, ticket: Ticket) -> None:
        self._services = services
        self._job = job
        self._client = client
        self._ticket = ticket
        self._identity: Identity | None = job.prefill.identity if job.prefill else None
        self._params: msgspec.Raw | None = None  # pull: P's answer
        self._dispatch = 0
        self._is_prefill_confirmed = False
        self._inbox: asyncio.Queue[Happened] = asyncio.Queue()
        self._legs: dict[Side, asyncio.Task[None]] = {}
        self._committed = asyncio.Event()
        self._outcome = RequestOutcome.ABORTED

    async def run(self) -> RequestOutcome:
        """The request is answered or given up, and no leg of it is left."""
        try:
            async with asyncio.TaskGroup() as group:
                watcher = group.create_task(self._watch_client())
                try:
                    await self._pump(group)
                finally:
                    for task in (watcher, *self._legs.values()):
                        task.cancel()
        finally:
            self._trace("finished", status=self._client.status or 499, outcome=self._outcome.value)
        return self._outcome

    async def _pump(self, group: asyncio.TaskGroup) -> None:
        effects, state = begin(self._job.route, knows_identity=self._identity is not None)
        happened: Happened | None = None
        while True:
            for effect in effects:
                await self._perform(effect, happened, group)
            if state is State.CLOSED:
                return
            happened = await self._inbox.get()
            is_current = happened.dispatch == self._dispatch or happened.what is Input.CLIENT_GONE
            effects, state = step(state, happened.what) if is_current else ((), state)

    def _post(self, what: Input, side: Side, dispatch: int, detail: Answer | LegFailure | None = None) -> None:
        self._inbox.put_nowait(Happened(what, side, dispatch, detail))

    def _trace(self, event: str, **fields: str | int) -> None:
        self._services.trace.event(event, self._ticket.transfer_id, request_id=self._ticket.request_id, **fields)

    # -- effects -------------------------------------------------------------------------------------------------

    async def _perform(self, effect: Effect, happened: Happened | None, group: asyncio.TaskGroup) -> None:
        match effect:
            case Effect.LEARN:
                self._legs[Side.PREFILL] = group.create_task(self._learn(self._dispatch))
            case Effect.SEND_PREFILL:
                self._legs[Side.PREFILL] = group.create_task(self._prefill_leg(self._dispatch))
            case Effect.SEND_DECODE:
                self._legs[Side.DECODE] = group.create_task(self._decode_leg(self._dispatch))
            case Effect.CANCEL_PREFILL:
                self._legs[Side.PREFILL].cancel()
            case Effect.CANCEL_DECODE:
                self._legs[Side.DECODE].cancel()
            case Effect.RENEW_TICKET:
                self._dispatch += 1
                self._ticket = new_ticket(self._ticket.request_id)
                self._services.counters.redispatched += 1
            case Effect.COMMIT:
                self._committed.set()
            case _:
                assert happened is not None, "the first step sends or learns"
                await self._close(effect, happened)

    async def _close(self, effect: Effect, happened: Happened) -> None:
        """The last effect: tells the client how it ended, if anybody is there to be told."""
        self._outcome = _OUTCOMES[effect]
        match effect:
            case Effect.FINISH:
                self._count_transfer()
                await self._client.send_chunk(b"", is_last=True)
            case Effect.PASS_ON_ERROR:
                await self._pass_on_error(happened)
            case Effect.REPORT_LOSS:
                await self._report_loss(happened)
            case Effect.BREAK_STREAM:
                await self._break_stream(happened)

    def _count_transfer(self) -> None:
        counters = self._services.counters
        if self._is_prefill_confirmed:
            counters.transfers[self._job.route] += 1
        elif self._job.route is not Route.DECODE_ONLY:
            counters.unconfirmed += 1

    async def _pass_on_error(self, happened: Happened) -> None:
        assert isinstance(happened.detail, Answer), "an error answer is passed on with it"
        await self._client.send_answer(happened.detail, self._ticket.request_id)

    async def _report_loss(self, happened: Happened) -> None:
        assert isinstance(happened.detail, LegFailure), "a loss is reported with its reason"
        answer = lost_answer(happened.side, self._url(happened.side), happened.detail)
        await self._client.send_answer(answer, self._ticket.request_id)

    async def _break_stream(self, happened: Happened) -> None:
        assert isinstance(happened.detail, LegFailure), "a stream is broken with its reason"
        event = lost_event(happened.side, self._url(happened.side), happened.detail)
        await self._client.send_chunk(event, is_last=True)

    def _url(self, side: Side) -> str:
        return self._job.decode.url if side is Side.DECODE else self._prefill.url

    @property
    def _prefill(self) -> Instance:
        assert self._job.prefill is not None, "only routes with a P come here"
        return self._job.prefill

    # -- legs: tasks that post what happened ---------------------------------------------------------------------

    async def _watch_client(self) -> None:
        await self._client.gone()
        self._post(Input.CLIENT_GONE, Side.DECODE, self._dispatch)

    async def _learn(self, dispatch: int) -> None:
        learned = await self._services.pool.learned(self._prefill)
        if isinstance(learned, LegFailure):
            self._post(Input.LEARN_FAILED, Side.PREFILL, dispatch, learned)
        else:
            self._identity = learned
            self._post(Input.LEARNED, Side.PREFILL, dispatch)

    async def _prefill_leg(self, dispatch: int) -> None:
        job, services, prefill = self._job, self._services, self._prefill
        expected = self._identity if job.route is Route.PUSH else None
        self._trace("prefill_dispatched", url=prefill.url)
        with prefill.occupied():
            body = prefill_body(job.request, self._ticket)
            reply = await services.upstream.prefill(prefill.url, job.request.api.value, body, self._engine_headers())
        if isinstance(reply, Answer):
            self._trace("prefill_answered", status=reply.status)
        verdict = judge_prefill(reply, expected, may_redispatch=dispatch == 0)
        if verdict.answer is not None:
            services.pool.saw_identity(prefill, verdict.answer.identity)
            self._identity, self._params = verdict.answer.identity, verdict.answer.params
        elif isinstance(verdict.detail, LegFailure):
            services.pool.saw_failure(prefill, verdict.detail)
        elif isinstance(verdict.detail, Answer):
            services.pool.saw_error(prefill, verdict.detail)
        self._is_prefill_confirmed = verdict.happened is Input.PREFILL_OK
        self._post(verdict.happened, Side.PREFILL, dispatch, verdict.detail)

    async def _decode_leg(self, dispatch: int) -> None:
        job, decode = self._job, self._job.decode
        body = decode_body(job.request, self._decode_params())
        self._trace("decode_dispatched", url=decode.url)
        with decode.occupied():
            async with self._services.upstream.decode(
                decode.url, job.request.api.value, body, self._engine_headers()
            ) as reply:
                await self._relay(reply, dispatch)

    async def _relay(self, reply: DecodeStream | Answer | LegFailure, dispatch: int) -> None:
        pool, decode = self._services.pool, self._job.decode
        if isinstance(reply, LegFailure):
            pool.saw_failure(decode, reply)
            self._post(Input.DECODE_LOST, Side.DECODE, dispatch, reply)
        elif isinstance(reply, Answer) and not reply.is_ok:
            pool.saw_error(decode, reply)
            self._post(Input.DECODE_ERROR, Side.DECODE, dispatch, reply)
        else:
            self._post(Input.DECODE_STARTED, Side.DECODE, dispatch)
            await self._committed.wait()
            self._trace("first_byte")
            failure = await self._copy(reply)
            if failure is None:
                self._post(Input.DECODE_ENDED, Side.DECODE, dispatch)
            else:
                pool.saw_failure(decode, failure)
                self._post(Input.DECODE_LOST, Side.DECODE, dispatch, failure)

    async def _copy(self, reply: DecodeStream | Answer) -> LegFailure | None:
        """D's head and all its bytes are with the client, or why not. The end of the body is left to FINISH."""
        client = self._client
        if isinstance(reply, Answer):
            await client.send_answer(reply, self._ticket.request_id, is_last=False)
            return None
        await client.send_head(reply.status, reply.headers, self._ticket.request_id)
        chunk: bytes | LegFailure = reply.first
        while isinstance(chunk, bytes):
            if not chunk:
                return None
            await client.send_chunk(chunk)
            chunk = await reply.next_chunk()
        return chunk

    def _decode_params(self) -> msgspec.Raw | None:
        if self._job.route is Route.PUSH:
            assert self._identity is not None, "a push is dispatched with an identity"
            return push_params(self._identity, self._ticket)
        return self._params

    def _engine_headers(self) -> dict[str, str]:
        return {**self._client.engine_headers, "X-Request-Id": self._ticket.request_id}

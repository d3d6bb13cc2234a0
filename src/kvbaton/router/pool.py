"""The instances: who is ready, what they serve, which engine each P is, and how much each carries.

Invariant: a P is READY only while its KV identity is known and nothing has spoken against it; the identity comes from
P's own answers, never from configuration, and goes with the first failure. One background task per instance probes
it: at once when asked to, else every `probe_interval_s`. Read next: `relay.py`.

| what happened | then |
|---|---|
| connection refused, no route, connect timeout | DOWN, identity forgotten, until a probe succeeds |
| P's leg reset, timed out or unusable | LEARNING, identity forgotten, probed at once |
| D's leg reset or timed out; any 5xx answer | probed at once, served meanwhile |
| P answered with another engine's identity | replaced |
| a client went away | nothing: that is not the instance's fault |
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from kvbaton.router.answers import Answer, FailureKind, LegFailure, Side
from kvbaton.router.legs import Identity, Ticket, read_prefill_answer, warm_up_body
from kvbaton.router.policy import InstanceView, Pair, Readiness, Snapshot, Unavailable, choose, known_models
from kvbaton.router.request import Api, Fields
from kvbaton.router.settings import RouterConfig
from kvbaton.router.upstream import Upstream
from kvbaton.types import TransferId

log = logging.getLogger("kvbaton.router")

_NO_CONNECTION = (FailureKind.UNREACHABLE, FailureKind.CONNECT_TIMEOUT)
_RECHECK_S = 1.0
"""Between probes of an instance that is not ready; `probe_interval_s` if that is shorter."""


def new_ticket(request_id: str | None = None) -> Ticket:
    """Fresh ids; the request id is kept where a request is dispatched again."""
    return Ticket(request_id=request_id or uuid.uuid4().hex, transfer_id=TransferId(f"xfer-{uuid.uuid4().hex}"))


class Instance:
    """One engine. Only this file changes its readiness."""

    def __init__(self, side: Side, url: str) -> None:
        self.side = side
        self.url = url
        self.readiness = Readiness.LEARNING
        self.reason = "not probed yet"
        self.models: Fields = {}
        self.identity: Identity | None = None
        self.in_flight = 0
        self.routed = 0
        self.failed = 0
        self.settled = asyncio.Event()
        """Set while readiness is READY or DOWN."""
        self.poked = asyncio.Event()

    @contextmanager
    def occupied(self) -> Iterator[None]:
        """Counts a leg as load until it has ended, a stream to its last byte."""
        self.in_flight += 1
        self.routed += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def become(self, readiness: Readiness, reason: str) -> None:
        if readiness is not self.readiness:
            level = logging.WARNING if readiness is Readiness.DOWN else logging.INFO
            log.log(level, "%s instance %s is %s: %s", self.side.value, self.url, readiness.value, reason)
        self.readiness = readiness
        self.reason = reason
        if readiness is Readiness.LEARNING:
            self.settled.clear()
        else:
            self.settled.set()

    def view(self) -> InstanceView:
        return InstanceView(self.url, self.readiness, self.in_flight, frozenset(self.models))

    def as_json(self) -> dict[str, object]:
        status: dict[str, object] = {
            "url": self.url,
            "readiness": self.readiness.value,
            "reason": self.reason,
            "models": sorted(self.models),
            "in_flight": self.in_flight,
            "routed": self.routed,
            "failed": self.failed,
        }
        if self.side is Side.PREFILL:
            status["identity_known"] = self.identity is not None
            status["identity"] = None if self.identity is None else msgspec.structs.asdict(self.identity)
        return status


class Pool:
    """Every instance and its prober. `start` and `stop` need the running loop."""

    def __init__(self, config: RouterConfig, upstream: Upstream) -> None:
        self._config = config
        self._upstream = upstream
        self.prefills = {url: Instance(Side.PREFILL, url) for url in config.prefill_urls}
        self.decodes = {url: Instance(Side.DECODE, url) for url in config.decode_urls}
        self._turns = {Side.PREFILL: 0, Side.DECODE: 0}
        self._probers: list[asyncio.Task[None]] = []

    # -- choosing ------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        return Snapshot(
            prefills=tuple(instance.view() for instance in self.prefills.values()),
            decodes=tuple(instance.view() for instance in self.decodes.values()),
            prefill_turn=self._turns[Side.PREFILL],
            decode_turn=self._turns[Side.DECODE],
        )

    def choose(self, model: str, *, wants_prefill: bool) -> Pair | Unavailable:
        """A pair; takes a turn on each side it uses."""
        choice = choose(self._config.policy, self.snapshot(), model, wants_prefill=wants_prefill)
        if isinstance(choice, Pair):
            self._turns[Side.DECODE] += 1
            if choice.prefill is not None:
                self._turns[Side.PREFILL] += 1
        return choice

    def models(self) -> Fields:
        """What the router serves: the models of its D's, which every request needs."""
        return {name: entry for decode in self.decodes.values() for name, entry in decode.models.items()}

    def known_models(self) -> tuple[str, ...]:
        return known_models(self.snapshot())

    def unready(self) -> str | None:
        """Why nothing can be served, or None when at least one P (if there are any) and one D are ready."""
        reasons = [
            f"no {side} instance is ready ("
            + ", ".join(f"{instance.url}: {instance.reason}" for instance in instances.values())
            + ")"
            for side, instances in (("prefill", self.prefills), ("decode", self.decodes))
            if instances and not any(one.readiness is Readiness.READY for one in instances.values())
        ]
        return "; ".join(reasons) or None

    # -- what legs report ----------------------------------------------------------------------------------------

    def saw_identity(self, prefill: Instance, identity: Identity) -> None:
        """P's answer told who it is."""
        if prefill.identity is not None and prefill.identity != identity:
            log.warning("prefill instance %s is now engine %s", prefill.url, identity.remote_engine_id)
        prefill.identity = identity
        if prefill.readiness is Readiness.LEARNING and prefill.models:
            prefill.become(Readiness.READY, "answered")

    def saw_failure(self, instance: Instance, failure: LegFailure) -> None:
        """A leg came to nothing."""
        instance.failed += 1
        log.warning("%s instance %s failed: %s", instance.side.value, instance.url, failure.detail)
        if failure.kind in _NO_CONNECTION:
            self._down(instance, failure)
        elif instance.side is Side.PREFILL:
            instance.identity = None
            if instance.readiness is Readiness.READY:
                instance.become(Readiness.LEARNING, failure.detail)
        instance.poked.set()

    def saw_error(self, instance: Instance, answer: Answer) -> None:
        """An error answer. A 4xx is the client's affair; a 5xx may be the last word of a dying engine."""
        if answer.status >= 500:
            instance.failed += 1
            instance.poked.set()

    async def learned(self, prefill: Instance) -> Identity | LegFailure:
        """P's identity, as soon as its prober has it."""
        try:
            async with asyncio.timeout(self._config.prefill_timeout_s):
                while prefill.identity is None:
                    await prefill.settled.wait()
                    if prefill.readiness is Readiness.DOWN:
                        return LegFailure(FailureKind.NOT_READY, prefill.reason)
        except TimeoutError:
            return LegFailure(FailureKind.TIMEOUT, f"its KV identity is unknown: {prefill.reason}")
        return prefill.identity

    # -- probing -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Mutates; does not wait for anything, so the router can say 503 while engines load."""
        for instance in (*self.prefills.values(), *self.decodes.values()):
            prober = asyncio.create_task(self._keep_probing(instance), name=f"probe {instance.url}")
            prober.add_done_callback(_tell_of_defect)
            self._probers.append(prober)

    async def stop(self) -> None:
        for prober in self._probers:
            prober.cancel()
        await asyncio.gather(*self._probers, return_exceptions=True)
        self._probers.clear()

    async def _keep_probing(self, instance: Instance) -> None:
        while True:
            instance.poked.clear()
            await self._probe(instance)
            ready = instance.readiness is Readiness.READY
            interval_s = self._config.probe_interval_s
            try:
                async with asyncio.timeout(interval_s if ready else min(interval_s, _RECHECK_S)):
                    await instance.poked.wait()
            except TimeoutError:
                continue

    async def _probe(self, instance: Instance) -> None:
        """Leaves `instance` READY, or DOWN with the reason."""
        failure = await self._upstream.health(instance.url)
        if failure is None:
            models = await self._upstream.models(instance.url)
            if isinstance(models, LegFailure):
                failure = models
            elif not models:
                failure = LegFailure(FailureKind.NOT_READY, "it serves no model")
            else:
                instance.models = models
                failure = await self._warm_up(instance)
        if failure is None:
            instance.become(Readiness.READY, "probed")
        elif failure.kind is FailureKind.TIMEOUT and instance.readiness is Readiness.READY:
            # Slow is not dead: a busy engine may answer probes late, and its requests have deadlines of their own.
            log.warning("%s instance %s: probe: %s", instance.side.value, instance.url, failure.detail)
        else:
            self._down(instance, failure)

    async def _warm_up(self, instance: Instance) -> LegFailure | None:
        """P's identity is known, by a real prefill, which also proves that P works."""
        if instance.side is Side.DECODE or instance.identity is not None:
            return None
        ticket = new_ticket()
        answer = await self._upstream.prefill(
            instance.url,
            Api.COMPLETIONS.value,
            warm_up_body(min(instance.models), ticket),
            {"X-Request-Id": ticket.request_id},
        )
        if isinstance(answer, LegFailure):
            return answer
        if not answer.is_ok:
            return LegFailure(FailureKind.NOT_READY, f"a warm-up prefill was answered {answer.status}")
        seen = read_prefill_answer(answer.body)
        if isinstance(seen, str):
            return LegFailure(FailureKind.BAD_ANSWER, seen)
        self.saw_identity(instance, seen.identity)
        return None

    def _down(self, instance: Instance, failure: LegFailure) -> None:
        instance.identity = None
        instance.become(Readiness.DOWN, failure.detail)


def _tell_of_defect(prober: asyncio.Task[None]) -> None:
    """A prober ends by being cancelled; anything else must not pass in silence."""
    if not prober.cancelled() and (error := prober.exception()):
        log.critical("%s ended by a defect; this instance is no longer watched", prober.get_name(), exc_info=error)

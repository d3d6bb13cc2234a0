"""The worker side: hands each step's commands to the driver and collects what it is done with.

Invariant: no call here plans, posts, polls, connects or touches a socket; each is an append or a take. The exceptions are
bounded: a short sleep in a step that has nothing else to do. Next: runtime/driver.py.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from kvbaton.cluster_key import read_key_file
from kvbaton.connector.handover import RankAddress, StepHandover
from kvbaton.connector.settings import ConnectorSettings
from kvbaton.connector.stats import BatonStats
from kvbaton.geometry.layout import KVLayout
from kvbaton.protocol.messages import PROTOCOL_VERSION, Hello
from kvbaton.protocol.rendezvous import Deadlines
from kvbaton.runtime.driver import Driver
from kvbaton.runtime.events import (
    Batch,
    DestinationOpened,
    Fence,
    Results,
    SourceAdvanced,
    SourceFinished,
    SourceRevoked,
)
from kvbaton.runtime.journal import Journal
from kvbaton.runtime.mover import Mover
from kvbaton.runtime.peers import Peers, agent_name
from kvbaton.runtime.rank import Rank
from kvbaton.runtime.sidechannel import SideChannel
from kvbaton.runtime.tally import Tally
from kvbaton.transport.base import Transport
from kvbaton.transport.nixl import NixlTransport
from kvbaton.types import EngineId, RequestId, TransferId

if TYPE_CHECKING:
    from kvbaton.transport.base import Span

logger = logging.getLogger("vllm.kvbaton")


class WorkerSide:
    def __init__(self, settings: ConnectorSettings, engine_id: EngineId, *, rank: int, first_rank: int = 0) -> None:
        """The side channel is bound: a taken port ends the engine here, with its number. Raises UsageError, Unsupported.

        `first_rank` is this engine's first among all ranks that share the settings (data parallelism).
        """
        self._settings = settings
        self._engine_id = engine_id
        self._rank_number = rank
        self._incarnation = uuid.uuid4().hex
        port = settings.side_channel_port + first_rank + rank if settings.side_channel_port else 0
        key = None if settings.cluster_key_file is None else read_key_file(Path(settings.cluster_key_file))
        self._channel = SideChannel(settings.side_channel_host, port, key)
        self._transport = NixlTransport(agent_name(engine_id, rank, self._incarnation), settings.backends)
        self._results = Results()
        self._tally = Tally(settings.report_wait_s)
        self._driver: Driver | None = None
        self._loading: set[RequestId] = set()
        self._held: set[RequestId] = set()
        self._rejected: dict[RequestId, str] = {}
        self._failed_loads: frozenset[RequestId] = frozenset()

    @property
    def address(self) -> RankAddress:
        return RankAddress(self._settings.peer_host, self._channel.port)

    def register(self, layout: KVLayout, spans: list[Span]) -> None:
        """The memory is known to the transport and the driver runs. Raises RegistrationFailed."""
        self._transport.register(spans, layout.memory_kind)
        hello = Hello(
            protocol_version=PROTOCOL_VERSION,
            engine_id=self._engine_id,
            rank=self._rank_number,
            incarnation=self._incarnation,
            agent_metadata=self._transport.local_metadata(),
            layout=layout,
        )

        def open_transport(name: str) -> Transport:
            transport = NixlTransport(name, self._settings.backends)
            transport.register(spans, layout.memory_kind)
            return transport

        settings = self._settings
        path = settings.trace_path and settings.trace_path.replace("{rank}", str(self._rank_number))
        journal = Journal(path, self._tally)
        rank = Rank(
            hello=hello,
            open_transport=open_transport,
            transport=self._transport,
            channel=self._channel,
            peers=Peers(self._transport, layout),
            mover=Mover(self._transport, journal),
            results=self._results,
            journal=journal,
            deadlines=Deadlines(
                open_s=max(settings.lease_s, settings.progress_timeout_s),
                posting_s=settings.progress_timeout_s,
                offered_s=settings.lease_s,
                draining_s=settings.drain_timeout_s,
            ),
            clock=time.monotonic,
        )
        self._driver = Driver(rank)
        self._driver.start()
        logger.info(
            "kvbaton: engine %s rank %d listens on %s:%d, %d regions, block size %s.",
            self._engine_id, self._rank_number, settings.side_channel_host, self._channel.port,
            len(layout.regions), list(layout.block_size_tokens),
        )  # fmt: skip

    def submit_before(self, step: StepHandover) -> None:
        if step.preempted:
            self._revoke(step.preempted)
        for command in step.before_forward:
            if isinstance(command, DestinationOpened):
                self._loading.add(command.request_id)
        self._rejected.update(step.rejected)
        if step.before_forward and self._driver is not None:
            self._driver.submit(step.before_forward)

    def _revoke(self, preempted: list[tuple[TransferId, RequestId]]) -> None:
        """The blocks of preempted prefills are no longer read: this step may overwrite them.

        The one wait on the engine's thread for bytes to move; it is rare, short (a segment that is already on its way)
        and bounded. What a write stuck for longer would carry is of an older generation, which the other side ignores.
        """
        if self._driver is None:
            return
        events = [threading.Event() for _ in preempted]
        self._driver.submit([SourceRevoked(*ids, released) for ids, released in zip(preempted, events, strict=True)])
        deadline_s = time.monotonic() + self._settings.drain_timeout_s
        for released in events:
            released.wait(max(0.0, deadline_s - time.monotonic()))

    def submit_after(self, step: StepHandover, fence: Fence | None) -> None:
        """The step's forward was issued: what it computes may be sent once the device has passed `fence`."""
        for command in step.after_forward:
            if isinstance(command, SourceFinished) and command.is_held:
                self._held.add(command.request_id)
        if step.after_forward and self._driver is not None:
            self._driver.submit(
                [
                    dataclasses.replace(command, fence=fence) if isinstance(command, SourceAdvanced) else command
                    for command in step.after_forward
                ]
            )

    def collect(self, *, is_idle_step: bool) -> Batch:
        """Requests whose transfers are over, each once. Raises whatever the driver died of."""
        if is_idle_step and (self._loading or self._held) and not self._rejected:
            self._results.wait(self._settings.idle_wait_s)
        batch = self._results.take()
        self._drop_strangers(batch)
        batch.received.update(self._rejected)
        batch.failed.update(self._rejected)
        self._rejected = {}
        self._loading -= batch.received
        self._held -= batch.sent
        self._failed_loads |= batch.failed.keys()
        return batch

    def take_failed_loads(self) -> frozenset[RequestId]:
        """Those that failed here since the last call."""
        failed, self._failed_loads = self._failed_loads, frozenset()
        return failed

    def _drop_strangers(self, batch: Batch) -> None:
        """The scheduler of vLLM dies of a request that it does not know, or no longer knows."""
        strangers = (batch.received - self._loading) | (batch.sent - self._held)
        if strangers:
            logger.error("The driver reports requests that nobody waits for: %s", ", ".join(sorted(strangers)))
            batch.received &= self._loading
            batch.sent &= self._held
            batch.failed = {each: reason for each, reason in batch.failed.items() if each in self._loading}

    def take_stats(self) -> BatonStats | None:
        """What was counted since the last call; None when there is nothing new."""
        snapshot = self._tally.take(time.monotonic())
        return None if snapshot is None else BatonStats.of(self._rank_number, snapshot)

    def shutdown(self) -> None:
        """Idempotent."""
        if self._driver is not None:
            self._driver.stop()
        else:  # the engine did not get as far as its cache
            self._transport.close()
            self._channel.close()

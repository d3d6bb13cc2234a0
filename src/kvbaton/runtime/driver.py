"""The background thread: the only one that touches the transport and the side channel.

It sleeps in one wait for the side channel's sockets and its inbox; only while bytes are in flight or a link is being made
does it look at the transport every fraction of a millisecond. Invariant: an exception here fails the engine through
`Results`, it is never logged and forgotten. Next: source.py and destination.py.
"""

from __future__ import annotations

import logging
import threading
from collections import deque

from kvbaton.errors import RemoteProtocolError
from kvbaton.protocol.messages import decode_notification, decode_side
from kvbaton.runtime.destination import DestinationEnd
from kvbaton.runtime.events import (
    Command,
    DestinationCancelled,
    DestinationOpened,
    NothingNeeded,
    SourceAdvanced,
    SourceFinished,
    SourceOpened,
    SourceRevoked,
)
from kvbaton.runtime.metrics import DROPPED, Channel
from kvbaton.runtime.rank import Rank
from kvbaton.runtime.seldom import Seldom
from kvbaton.runtime.sidechannel import Endpoint, Received
from kvbaton.runtime.source import SourceEnd
from kvbaton.transport.base import Operation

logger = logging.getLogger("vllm.kvbaton")

FAST_TICK_S = 0.0003
SLOW_TICK_S = 0.02
IDLE_TICK_S = 1.0

STALL_S = 2.0
"""A loop that did not turn for so long (twice its longest sleep) cannot tell how old what it reads next is."""


class Driver:
    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._source = SourceEnd(rank)
        self._destination = DestinationEnd(rank)
        self._inbox: deque[Command] = deque()
        # KV that the device is still computing, in the order of the device's stream.
        self._computing: deque[SourceAdvanced] = deque()
        self._dropped = Seldom(rank.clock)
        self._is_stopping = False
        self._turned_s = rank.clock()
        self._thread = threading.Thread(target=self._run, name="kvbaton", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, commands: list[Command]) -> None:
        """Hands `commands` over, in order. From the engine's thread; never blocks."""
        self._inbox.extend(commands)
        self._rank.channel.wake()

    def stop(self, timeout_s: float = 5.0) -> None:
        """The thread has ended and everything it owned is released. Idempotent."""
        if self._thread.is_alive():
            self._is_stopping = True
            self._rank.channel.wake()
            self._thread.join(timeout_s)
        elif self._thread.ident is None:
            self.close()

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._rank.channel.wait(self._pause_s())
                self.turn()
        except BaseException as error:
            logger.exception("The transfer thread died; the engine cannot go on without it.")
            self._rank.results.fail(error)
            raise
        finally:
            self.close()

    def _pause_s(self) -> float:
        if self._inbox:
            return 0.0
        now_s = self._rank.clock()
        if self._computing or self._rank.mover.is_busy or self._needs_progress(now_s):
            return FAST_TICK_S
        return SLOW_TICK_S if len(self._destination) or self._source.has_offered else IDLE_TICK_S

    def _needs_progress(self, now_s: float) -> bool:
        """Bytes or a connection of a peer's may be waiting for our library to do its part."""
        return (
            self._rank.peers.are_connecting(now_s)
            or self._destination.is_expecting(now_s)
            or self._source.is_being_read(now_s)
        )

    def turn(self) -> None:
        """Everything that can be done now is done. Called by the thread, or by a test instead of `start`; never blocks.

        Peers are heard before commands are obeyed: after a stall, a cancellation that waits here must be seen before
        anything more is posted.
        """
        now_s = self._rank.clock()
        if now_s - self._turned_s > STALL_S:
            self._source.stalled(now_s)
        news = self._rank.channel.receive()
        if self._rank.channel.is_behind:
            self._source.fell_behind(now_s)
        for received in news:
            self._hear(received, now_s)
        while self._inbox:
            self._obey(self._inbox.popleft(), now_s)
        while self._computing and _has_passed(self._computing[0]):
            self._source.advanced(self._computing.popleft(), now_s)
        for endpoint in self._rank.channel.lost():
            self._destination.lost(endpoint, now_s, "the connection broke")
        for endpoint, why in self._rank.channel.refused():
            self._destination.lost(endpoint, now_s, why, what="will not talk to this engine")
        self._watch_transport(now_s)
        self._source.tick(now_s)
        self._destination.tick(now_s)
        self._rank.peers.forget_idle(now_s)
        self._turned_s = now_s

    def _obey(self, command: Command, now_s: float) -> None:
        match command:
            case SourceOpened():
                self._source.opened(command, now_s)
            case SourceAdvanced():
                self._computing.append(command)
            case SourceRevoked():
                self._computing = deque(each for each in self._computing if each.request_id != command.request_id)
                self._source.revoked(command, now_s)
            case SourceFinished():
                self._source.finished(command, now_s)
            case DestinationOpened():
                self._destination.opened(command, now_s)
            case DestinationCancelled():
                self._destination.cancelled(command, now_s)
            case NothingNeeded():
                self._destination.nothing_needed(command.ticket, now_s)

    def _hear(self, received: Received, now_s: float) -> None:
        try:
            message = decode_side(received.data)
            if isinstance(received.route, Endpoint):
                self._destination.receive(received.route, message, now_s)
            else:
                self._source.receive(received.route, message, now_s)
        except RemoteProtocolError as error:
            self._rank.journal.tally.count(DROPPED, Channel.SIDE_CHANNEL)
            if count := self._dropped.add():
                logger.warning("Dropped %d side-channel messages; the last: %s", count, error)

    def _watch_transport(self, now_s: float) -> None:
        for settled in self._rank.mover.poll():
            end = self._source if settled.move.operation is Operation.WRITE else self._destination
            end.settled(settled, now_s)
        if not (len(self._destination) or self._source.has_offered or self._rank.peers.are_connecting(now_s)):
            return
        for arrival in self._rank.transport.arrivals():
            try:
                self._destination.arrived(arrival.sender, decode_notification(arrival.data), now_s)
            except RemoteProtocolError as error:
                self._rank.journal.tally.count(DROPPED, Channel.TRANSPORT)
                if count := self._dropped.add():
                    logger.warning(
                        "Dropped %d messages; the last, a notification of %s: %s", count, arrival.sender, error
                    )

    def close(self) -> None:
        """Everything the driver owned is released. Idempotent; by the driver's thread, or where that never ran."""
        self._rank.transport.close()
        self._rank.channel.close()
        self._rank.journal.close()


def _has_passed(command: SourceAdvanced) -> bool:
    return command.fence is None or command.fence.query()

"""Posts segments and watches them until the transport is done with them.

Invariant: a handle is here from before it is posted until it is released, so "nothing in flight" means that the
transport cannot touch the transfer's blocks. Next: source.py and destination.py, which decide what to move.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvbaton.errors import BatonError
from kvbaton.geometry.descriptors import describe
from kvbaton.protocol.messages import SegmentLanded, encode
from kvbaton.protocol.rendezvous import Rendezvous
from kvbaton.protocol.segments import Segment, Segments
from kvbaton.runtime.events import BlockLists
from kvbaton.runtime.journal import Journal
from kvbaton.runtime.metrics import FAILED_NOTIFICATIONS, OVERLAP, SEGMENTS
from kvbaton.runtime.peers import Peer
from kvbaton.transport.base import Handle, Operation, Progress, Transport
from kvbaton.types import End, TransferId

MAX_SEGMENTS_IN_FLIGHT = 4
"""Of one move."""

_OUR_END = {Operation.WRITE: End.SOURCE, Operation.READ: End.DESTINATION}


@dataclass
class Move:
    """The moving part of one transfer at the poster: what to move, to or from whom, and how far it is."""

    transfer_id: TransferId
    rendezvous: Rendezvous
    operation: Operation
    peer: Peer
    segments: Segments
    their_blocks: BlockLists
    num_tokens: int
    """Of the whole prompt."""
    registration: int = 0
    """Of whom it is for; 0 at the reader's own end."""
    our_blocks: BlockLists = ()
    num_bytes: int = 0
    """That were posted."""
    num_bytes_moved: int = 0
    num_bytes_hidden: int | None = None
    """Of these, those that had been moved when the prefill was over; None before that, and of a READ."""
    num_in_flight: int = 0
    is_stopped: bool = False
    abandoned_s: float | None = None
    """When the transport was first asked to let go of what is in flight."""


@dataclass(frozen=True)
class Settled:
    """The transport is done with one segment; `failure` says why it did not arrive."""

    move: Move
    segment: Segment
    failure: str | None


@dataclass
class _InFlight:
    move: Move
    segment: Segment
    num_bytes: int
    posted_s: float
    failure: str | None = None


class Mover:
    def __init__(self, transport: Transport, journal: Journal) -> None:
        self._transport = transport
        self._journal = journal
        self._in_flight: dict[Handle, _InFlight] = {}
        self._cut_off: list[_InFlight] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._in_flight or self._cut_off)

    def pump(self, move: Move) -> int:
        """Posts segments that are ready, and returns how many; the rest when one of them has settled.

        Over shared memory the copy happens inside the post: the loop must get round to hearing a cancellation in between.
        Raises BatonError of the first that cannot be posted.
        """
        num_posted = 0
        while not move.is_stopped and move.num_in_flight < MAX_SEGMENTS_IN_FLIGHT:
            segment = move.segments.take()
            if segment is None:
                break
            self._post(move, segment)
            num_posted += 1
        return num_posted

    def _post(self, move: Move, segment: Segment) -> None:
        started_s = time.monotonic()
        try:
            descriptors = describe(
                move.peer.mapping(_OUR_END[move.operation]),
                move.our_blocks,
                move.their_blocks,
                first_token=segment.first_token,
                end_token=segment.end_token,
                num_tokens=move.num_tokens,
            )
            planned_s = time.monotonic()
            notification = _notification(move, segment)
            if descriptors.num_descriptors == 0:
                self._post_nothing(move, segment, notification)
                return
            handle = self._transport.post(
                move.operation, move.peer.agent, descriptors, move.peer.hello.layout.device_id, notification
            )
        except BatonError:
            move.segments.confirm(segment)
            self._journal.not_moved()
            raise
        move.num_in_flight += 1
        move.num_bytes += descriptors.num_bytes
        self._in_flight[handle] = _InFlight(move, segment, descriptors.num_bytes, planned_s)
        self._journal.posted(
            _OUR_END[move.operation],
            move.transfer_id,
            peer=move.peer,
            segment=segment.number,
            num_bytes=descriptors.num_bytes,
            num_descriptors=descriptors.num_descriptors,
            plan_s=planned_s - started_s,
            post_s=time.monotonic() - planned_s,
        )

    def _post_nothing(self, move: Move, segment: Segment, notification: bytes) -> None:
        """The segment has no bytes (all of them were sent before); the other side still counts it."""
        if notification:
            try:
                self._transport.notify(move.peer.agent, notification)
            except BatonError:
                self._journal.tally.count(FAILED_NOTIFICATIONS)
                raise
        move.segments.confirm(segment)

    def poll(self) -> list[Settled]:
        """Lets the transport work, and returns the segments it is done with since the last call."""
        settled = [self._settle(flight) for flight in self._cut_off]
        self._cut_off = []
        for handle, flight in list(self._in_flight.items()):
            progress = self._transport.poll(handle)
            if progress is Progress.MOVING and flight.failure is None:
                continue
            if progress is Progress.FAILED and flight.failure is None:
                flight.failure = f"the transport reports that a {flight.move.operation.value} failed"
            if not self._transport.release(handle):
                continue
            del self._in_flight[handle]
            settled.append(self._settle(flight))
        return settled

    def abandon(self, move: Move) -> bool:
        """From now on the transport is asked to let go of the move's handles, whatever they do. False when it was before."""
        flights = [each for each in self._in_flight.values() if each.move is move and each.failure is None]
        for flight in flights:
            flight.failure = f"a {move.operation.value} was abandoned"
        return bool(flights)

    def completed(self, move: Move) -> None:
        """All of it is at the other side."""
        self._journal.tally.observe(SEGMENTS, move.segments.num_posted)
        if move.num_bytes_hidden is not None and move.num_bytes_moved:
            self._journal.tally.observe(OVERLAP, move.num_bytes_hidden / move.num_bytes_moved)

    def replace_transport(self, transport: Transport) -> None:
        """The old one is closed: what was in flight is over, and the next `poll` says so."""
        self._transport = transport
        for flight in self._in_flight.values():
            flight.failure = flight.failure or f"a {flight.move.operation.value} was cut off with the transport"
            self._cut_off.append(flight)
        self._in_flight = {}

    def _settle(self, flight: _InFlight) -> Settled:
        move = flight.move
        move.num_in_flight -= 1
        move.segments.confirm(flight.segment)
        if flight.failure is None:
            move.num_bytes_moved += flight.num_bytes
            self._journal.moved(
                _OUR_END[move.operation],
                move.transfer_id,
                peer=move.peer,
                segment=flight.segment.number,
                num_bytes=flight.num_bytes,
                move_s=time.monotonic() - flight.posted_s,
            )
        else:
            self._journal.not_moved()
        return Settled(move, flight.segment, flight.failure)


def _notification(move: Move, segment: Segment) -> bytes:
    """What travels with a WRITE. A READ carries nothing: the reader tells the source over the side channel."""
    if move.operation is Operation.READ:
        return b""
    return encode(
        SegmentLanded(
            transfer_id=move.transfer_id,
            generation=segment.generation,
            segment=segment.number,
            is_last=segment.is_last,
            registration=move.registration,
        )
    )

"""The decode end of transfers: registers allocated blocks with the prefill side, and says when their KV is there.

Push: the prefill side writes; we count its notifications. Pull: it offers its blocks; we read. Invariant: every request
that came in is reported `received` exactly once, and only when nothing can touch its blocks any more.
Next: driver.py, the loop around both ends.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvbaton.errors import BatonError, PeerLost, RemoteProtocolError
from kvbaton.protocol.messages import (
    Accepted,
    Cancel,
    Connected,
    Ended,
    Greeting,
    HelloWanted,
    Notification,
    Offer,
    Register,
    Release,
    Renew,
    SegmentLanded,
    SegmentPosted,
    SideMessage,
    encode,
)
from kvbaton.protocol.params import DecodeTicket
from kvbaton.protocol.receipt import Receipt
from kvbaton.protocol.rendezvous import Effect, Input, Rendezvous, State
from kvbaton.protocol.segments import Segments
from kvbaton.runtime.events import DestinationCancelled, DestinationOpened
from kvbaton.runtime.mover import Move, Settled
from kvbaton.runtime.peers import CONNECT_TIMEOUT_S, is_agent_of
from kvbaton.runtime.rank import Rank
from kvbaton.runtime.sidechannel import Endpoint
from kvbaton.transport.base import AgentName, Operation
from kvbaton.types import Direction, Outcome, TransferId

logger = logging.getLogger("vllm.kvbaton")

MAX_RENEW_INTERVAL_S = 5.0


@dataclass
class Line:
    """What we know of the process behind an endpoint."""

    opened_s: float
    knows_us: bool = False
    has_answered: bool = False
    has_greeted: bool = False
    """Its transport has reached ours."""


@dataclass
class DestinationTransfer:
    opened: DestinationOpened
    endpoint: Endpoint
    rendezvous: Rendezvous
    receipt: Receipt
    renew_at_s: float
    unanswered_at_s: float
    """By then somebody must have answered at the endpoint."""
    move: Move | None = None
    lease_s: float | None = None
    """For how long the offered blocks are held from each of our signs of life on."""
    lease_until_s: float = float("inf")
    is_expecting: bool = False
    """A segment is known to be on its way."""

    @property
    def transfer_id(self) -> TransferId:
        return self.opened.ticket.transfer_id

    @property
    def direction(self) -> Direction:
        return self.opened.ticket.direction

    @property
    def num_in_flight(self) -> int:
        return 0 if self.move is None else self.move.num_in_flight


class DestinationEnd:
    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        # Three signs of life fit into the shortest time that either side waits for one.
        deadlines = rank.deadlines
        shortest_s = min(deadlines.open_s, deadlines.offered_s, deadlines.draining_s)
        self._renew_interval_s = min(MAX_RENEW_INTERVAL_S, shortest_s / 3)
        self._lines: dict[Endpoint, Line] = {}
        self._transfers: dict[tuple[Endpoint, TransferId], DestinationTransfer] = {}

    # -- the engine's side -------------------------------------------------------------------------------------------

    def opened(self, command: DestinationOpened, now_s: float) -> None:
        ticket = command.ticket
        endpoint = self._endpoint_of(ticket)
        if (endpoint, ticket.transfer_id) in self._transfers:
            reason = f"another request here already receives transfer {ticket.transfer_id}"
            logger.warning("Request %s: %s", command.request_id, reason)
            self._rank.results.received(command.request_id, reason)
            return
        transfer = DestinationTransfer(
            opened=command,
            endpoint=endpoint,
            rendezvous=Rendezvous(self._rank.deadlines, now_s),
            receipt=Receipt(num_producer_ranks=1),
            renew_at_s=now_s + self._renew_interval_s,
            unanswered_at_s=now_s + CONNECT_TIMEOUT_S,
        )
        self._transfers[endpoint, ticket.transfer_id] = transfer
        self._rank.destination_trace.emit(
            "registered",
            ticket.transfer_id,
            direction=ticket.direction.value,
            num_blocks=sum(len(group) for group in command.blocks),
            num_tokens=command.num_tokens - command.first_token,
        )
        try:
            self._register(transfer, now_s)
        except PeerLost as error:
            self.lost(endpoint, now_s, str(error))
            return
        if transfer.direction is Direction.PUSH:
            self._feed(transfer, Input.OFFERS, now_s)

    def _endpoint_of(self, ticket: DecodeTicket) -> Endpoint:
        """Our counterpart's: the ticket names rank 0's port, and rank r listens on the r-th after it."""
        return Endpoint(ticket.host, ticket.port + self._rank.hello.rank)

    def _register(self, transfer: DestinationTransfer, now_s: float, *, is_introducing: bool = False) -> None:
        line = self._lines.setdefault(transfer.endpoint, Line(opened_s=now_s))
        ticket, opened = transfer.opened.ticket, transfer.opened
        register = Register(
            transfer_id=ticket.transfer_id,
            to_engine_id=ticket.engine_id,
            from_incarnation=self._rank.hello.incarnation,
            direction=ticket.direction,
            first_token=opened.first_token,
            num_tokens=opened.num_tokens,
            blocks=opened.blocks,
            hello=self._rank.hello if is_introducing or not line.knows_us else None,
        )
        line.knows_us = True
        self._say(transfer.endpoint, register)

    def cancelled(self, command: DestinationCancelled, now_s: float) -> None:
        for transfer in list(self._transfers.values()):
            if transfer.opened.request_id == command.request_id:
                self._feed(transfer, Input.CANCEL, now_s, "the decode request was given up")

    def nothing_needed(self, ticket: DecodeTicket) -> None:
        """The source learns at once that nobody will come for this transfer.

        vLLM also says so, under another request id, of a request whose client left: if that one is in our hands, its own
        cancellation ends it, safely.
        """
        endpoint = self._endpoint_of(ticket)
        if (endpoint, ticket.transfer_id) in self._transfers:
            return
        try:
            self._say(endpoint, Release(ticket.transfer_id, ticket.engine_id, "the decode side needs nothing"))
        except PeerLost as error:
            logger.warning("Transfer %s is not needed, but nobody can be told: %s", ticket.transfer_id, error)

    # -- the peer's side ---------------------------------------------------------------------------------------------

    def receive(self, endpoint: Endpoint, message: SideMessage, now_s: float) -> None:
        """Raises RemoteProtocolError for a message that a prefill side must not send."""
        if not isinstance(message, Accepted | HelloWanted | Offer | SegmentPosted | Ended | Cancel):
            raise RemoteProtocolError(f"{type(message).__name__} is not for a decode side")
        line = self._lines.get(endpoint)
        if line is not None:
            line.has_answered = True
        transfer = self._transfers.get((endpoint, TransferId(message.transfer_id)))
        if transfer is None:
            return
        match message:
            case Accepted():
                self._accepted(transfer, now_s)
            case HelloWanted() if transfer.rendezvous.state in {State.OPEN, State.OFFERED}:
                self._register(transfer, now_s, is_introducing=True)
            case Offer():
                self._offered(transfer, message, now_s)
            case SegmentPosted():
                transfer.is_expecting = True
            case Ended():
                self._ended(transfer, message, now_s)
            case Cancel():
                self._feed(transfer, Input.CANCEL, now_s, message.reason or "the prefill side cancelled")

    def _accepted(self, transfer: DestinationTransfer, now_s: float) -> None:
        transfer.rendezvous.heard(now_s)
        if transfer.lease_s is not None:
            # Counted from when we asked, which is before the prefill side counts from.
            asked_s = transfer.renew_at_s - self._renew_interval_s
            transfer.lease_until_s = max(transfer.lease_until_s, asked_s + transfer.lease_s)

    def _ended(self, transfer: DestinationTransfer, message: Ended, now_s: float) -> None:
        if transfer.rendezvous.state is State.DRAINING and transfer.direction is Direction.PUSH:
            self._feed(transfer, Input.QUIET, now_s)
        elif message.outcome is Outcome.DELIVERED and transfer.direction is Direction.PUSH:
            transfer.is_expecting = True  # all was written: its notifications are on their way through the transport
        else:
            reason = f"the prefill side ended the transfer: {message.outcome.value}"
            self._feed(transfer, Input.FAIL, now_s, f"{reason} ({message.reason})" if message.reason else reason)

    def arrived(self, sender: AgentName, notification: Notification, now_s: float) -> None:
        """A notification came through the transport. Raises RemoteProtocolError when its sender has no business with it."""
        if isinstance(notification, Greeting):
            self._greeted(sender)
            return
        transfer = self._receiver_of(sender, notification)
        if transfer is None or transfer.rendezvous.state not in {State.OFFERED, State.DRAINING}:
            return
        is_news = transfer.receipt.add(
            generation=notification.generation,
            producer_rank=notification.producer_rank,
            segment=notification.segment,
            is_last=notification.is_last,
        )
        if not is_news:
            return
        self._rank.destination_trace.emit("segment_arrived", transfer.transfer_id, segment=notification.segment)
        transfer.is_expecting = False
        transfer.rendezvous.heard(now_s)
        if transfer.receipt.is_complete:
            self._feed(transfer, Input.COMPLETE, now_s)

    def _receiver_of(self, sender: AgentName, landed: SegmentLanded) -> DestinationTransfer | None:
        for transfer in self._transfers.values():
            if transfer.transfer_id == landed.transfer_id and is_agent_of(sender, transfer.opened.ticket.engine_id):
                return transfer
        return None

    def _greeted(self, sender: AgentName) -> None:
        for transfer in self._transfers.values():
            line = self._lines.get(transfer.endpoint)
            if line is not None and not line.has_greeted and is_agent_of(sender, transfer.opened.ticket.engine_id):
                line.has_greeted = True
                self._say(transfer.endpoint, Connected())

    # -- reading (pull) ----------------------------------------------------------------------------------------------

    def _offered(self, transfer: DestinationTransfer, offer: Offer, now_s: float) -> None:
        if transfer.direction is not Direction.PULL or transfer.rendezvous.state is not State.OPEN:
            return
        opened = transfer.opened
        try:
            if offer.hello.engine_id != opened.ticket.engine_id:
                raise RemoteProtocolError(f"engine {offer.hello.engine_id} answers for {opened.ticket.engine_id}")
            if offer.num_tokens != opened.num_tokens:
                raise RemoteProtocolError(
                    f"the prompt has {opened.num_tokens} tokens here and {offer.num_tokens} at the prefill side"
                )
            peer = self._rank.peers.greet(offer.hello, now_s)
        except BatonError as error:
            self._feed(transfer, Input.FAIL, now_s, str(error))
            return
        move = transfer.move = Move(
            transfer_id=transfer.transfer_id,
            rendezvous=transfer.rendezvous,
            operation=Operation.READ,
            peer=peer,
            segments=Segments(opened.first_token, self._rank.alignment_tokens),
            their_blocks=offer.blocks,
            our_blocks=opened.blocks,
        )
        # P counts from when it sent the offer, a little earlier; its drain after the lease's end is far longer than that.
        transfer.lease_s, transfer.lease_until_s = offer.lease_s, now_s + offer.lease_s
        self._feed(transfer, Input.POSTS, now_s)
        move.segments.advance(offer.num_tokens, is_final=True, generation=0)
        try:
            self._rank.mover.pump(move)
        except BatonError as error:
            self._feed(transfer, Input.FAIL, now_s, str(error))
            return
        self._maybe_complete(transfer, now_s)

    def settled(self, transfer_id: TransferId, settled: Settled, now_s: float) -> None:
        """The transport is done with a READ of ours."""
        for transfer in list(self._transfers.values()):
            if transfer.move is settled.move and transfer.transfer_id == transfer_id:
                if settled.failure is not None:
                    self._feed(transfer, Input.FAIL, now_s, settled.failure)
                else:
                    settled.move.peer.connecting_until_s = now_s
                    transfer.rendezvous.moved(now_s)
                    self._maybe_complete(transfer, now_s)
                if transfer.rendezvous.state is State.DRAINING and transfer.num_in_flight == 0:
                    self._feed(transfer, Input.QUIET, now_s)

    def _maybe_complete(self, transfer: DestinationTransfer, now_s: float) -> None:
        if transfer.rendezvous.state is not State.POSTING or transfer.move is None:
            return
        if now_s > transfer.lease_until_s:
            self._feed(transfer, Input.FAIL, now_s, "the prefill side's lease ended before the blocks were read")
        elif transfer.move.segments.is_complete:
            self._feed(transfer, Input.COMPLETE, now_s)

    # -- time, loss, and the machine's effects -----------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        for transfer in list(self._transfers.values()):
            if transfer.rendezvous.is_overdue(now_s):
                self._feed(transfer, Input.EXPIRE, now_s, f"no progress while {transfer.rendezvous.state.value}")
            elif self._is_unanswered(transfer, now_s):
                self.lost(transfer.endpoint, now_s, "nobody answers at that address")
            elif now_s >= transfer.renew_at_s and not transfer.rendezvous.is_closed:
                transfer.renew_at_s = now_s + self._renew_interval_s
                self._say(transfer.endpoint, Renew(transfer.transfer_id))

    def _is_unanswered(self, transfer: DestinationTransfer, now_s: float) -> bool:
        line = self._lines.get(transfer.endpoint)
        return line is not None and not line.has_answered and now_s >= transfer.unanswered_at_s

    def lost(self, endpoint: Endpoint, now_s: float, why: str) -> None:
        """The process behind `endpoint` is gone: nothing of it can reach us any more, and its transfers fail now."""
        self._lines.pop(endpoint, None)
        self._rank.channel.hang_up(endpoint)
        for transfer in list(self._transfers.values()):
            if transfer.endpoint == endpoint:
                reason = f"the prefill side at {endpoint.host}:{endpoint.port} is gone: {why}"
                self._feed(transfer, Input.LOST, now_s, reason)

    def _feed(self, transfer: DestinationTransfer, what: Input, now_s: float, reason: str = "") -> None:
        if transfer.rendezvous.state is State.DRAINING and transfer.move is not None and transfer.num_in_flight:
            # Neither a clock nor a peer's end stops an operation of ours: it is over when its handle is (`settled`).
            if what in {Input.EXPIRE, Input.LOST} and self._rank.mover.abandon(transfer.move):
                self._rank.peers.forget(transfer.move.peer)
            return
        for effect in transfer.rendezvous.handle(what, now_s, reason):
            match effect:
                case Effect.STOP_POSTING:
                    self._stop(transfer, now_s)
                case Effect.TELL_CANCEL:
                    self._say(transfer.endpoint, Cancel(transfer.transfer_id, transfer.rendezvous.reason))
                case Effect.TELL_ENDED:
                    self._tell_ended(transfer)
                case Effect.FENCE_PEER:
                    self._fence(transfer)
                case Effect.REPORT:
                    self._report(transfer)

    def _tell_ended(self, transfer: DestinationTransfer) -> None:
        if transfer.endpoint in self._lines:  # else it is gone: calling again would only leave a socket behind
            outcome = transfer.rendezvous.outcome or Outcome.FAILED
            self._say(transfer.endpoint, Ended(transfer.transfer_id, outcome, transfer.rendezvous.reason))

    def _stop(self, transfer: DestinationTransfer, now_s: float) -> None:
        if transfer.move is not None:
            transfer.move.is_stopped = True
        if transfer.num_in_flight == 0:
            self._feed(transfer, Input.QUIET, now_s)

    def _fence(self, transfer: DestinationTransfer) -> None:
        """After this the silent peer must introduce itself anew before anything of it is believed."""
        self._lines.pop(transfer.endpoint, None)
        self._rank.channel.hang_up(transfer.endpoint)
        if transfer.move is not None:
            self._rank.peers.forget(transfer.move.peer)

    def _report(self, transfer: DestinationTransfer) -> None:
        outcome, reason = transfer.rendezvous.outcome or Outcome.FAILED, transfer.rendezvous.reason
        del self._transfers[transfer.endpoint, transfer.transfer_id]
        is_delivered = outcome is Outcome.DELIVERED
        self._rank.results.received(transfer.opened.request_id, None if is_delivered else reason)
        num_bytes = 0 if transfer.move is None else transfer.move.num_bytes
        self._rank.destination_trace.emit(
            "closed", transfer.transfer_id, outcome=outcome.value, reason=reason, num_bytes=num_bytes
        )
        if not is_delivered:
            level = logging.INFO if outcome is Outcome.CANCELLED else logging.WARNING
            logger.log(level, "Transfer %s did not deliver: %s (%s)", transfer.transfer_id, outcome.value, reason)

    def _say(self, endpoint: Endpoint, message: SideMessage) -> None:
        self._rank.channel.send(endpoint, encode(message))

    # -- what the loop needs to know ---------------------------------------------------------------------------------

    def is_expecting(self, now_s: float) -> bool:
        """Something may come through the transport at any moment, so it should be looked at often."""
        return any(transfer.is_expecting for transfer in self._transfers.values()) or any(
            not line.has_greeted and now_s < line.opened_s + CONNECT_TIMEOUT_S
            for endpoint, line in self._lines.items()
            if any(t.endpoint == endpoint and t.direction is Direction.PUSH for t in self._transfers.values())
        )

    def __len__(self) -> int:
        return len(self._transfers)

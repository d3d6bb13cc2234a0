"""The decode end of transfers: registers allocated blocks with the prefill ranks, and says when their KV is there.

Push: the prefill side writes; we count its notifications. Pull: it offers its blocks; we read. Invariant: every request
that came in is reported `received` exactly once, and only when nothing can touch its blocks any more.
Next: driver.py, the loop around both ends.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from kvbaton.errors import BatonError, RemoteProtocolError
from kvbaton.geometry.topology import num_readers, producers_of, unread_by_all
from kvbaton.protocol.messages import (
    Accepted,
    Cancel,
    Confirm,
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
)
from kvbaton.protocol.params import DecodeTicket
from kvbaton.protocol.rendezvous import Effect, Input, Rendezvous, State
from kvbaton.runtime.destination_transfer import Leg, Reception
from kvbaton.runtime.events import DestinationCancelled, DestinationOpened
from kvbaton.runtime.lines import Lines
from kvbaton.runtime.metrics import Fenced, Why
from kvbaton.runtime.mover import Move, Settled
from kvbaton.runtime.peers import CONNECT_TIMEOUT_S, is_agent_of
from kvbaton.runtime.rank import Rank
from kvbaton.runtime.sidechannel import Endpoint
from kvbaton.runtime.waiting import decode_sentence
from kvbaton.transport.base import AgentName, Operation
from kvbaton.types import Direction, End, Outcome, RequestId, TransferId

logger = logging.getLogger("vllm.kvbaton")

MAX_RENEW_INTERVAL_S = 5.0
_UNWANTED = "nobody here wants it any more"


class DestinationEnd:
    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        # Three signs of life fit into the shortest time that either side waits for one.
        deadlines = rank.deadlines
        shortest_s = min(deadlines.open_s, deadlines.offered_s, deadlines.draining_s)
        self._renew_interval_s = min(MAX_RENEW_INTERVAL_S, shortest_s / 3)
        self._lines = Lines(rank.channel)
        self._receptions: dict[RequestId, Reception] = {}
        self._legs: dict[TransferId, list[Leg]] = {}
        self._num_registrations = 0

    # -- the engine's side -------------------------------------------------------------------------------------------

    def opened(self, command: DestinationOpened, now_s: float) -> None:
        ticket = command.ticket
        reception = Reception(command, now_s)
        try:
            reception.legs = [self._new_leg(reception, rank, now_s) for rank in self._producers(ticket)]
        except BatonError as error:
            reason = str(error)
        else:
            taken = {leg.endpoint for leg in self._legs.get(ticket.transfer_id, ())}
            if not taken.intersection(leg.endpoint for leg in reception.legs):
                self._open(reception, now_s)
                return
            reason = f"another request here already receives transfer {ticket.transfer_id}"
        logger.warning("Request %s: %s", command.request_id, reason)
        self._rank.results.received(command.request_id, reason)

    def _producers(self, ticket: DecodeTicket) -> tuple[int, ...]:
        """The prefill ranks that feed us. Raises Incompatible when the two sizes do not fit the number of heads."""
        return producers_of(self._rank.hello.layout, ticket.tp_size, ticket.pp_size)

    def _new_leg(self, reception: Reception, rank: int, now_s: float) -> Leg:
        ticket = reception.opened.ticket
        self._num_registrations += 1
        return Leg(
            reception,
            rank,
            self._num_registrations,
            _endpoint_of(ticket, rank),
            num_readers=num_readers(self._rank.hello.layout, ticket.tp_size, rank),
            incarnation=self._rank.incarnation,
            rendezvous=Rendezvous(self._rank.deadlines, now_s),
            renew_at_s=now_s + self._renew_interval_s,
            unanswered_at_s=now_s + CONNECT_TIMEOUT_S,
        )

    def _open(self, reception: Reception, now_s: float) -> None:
        command = reception.opened
        self._receptions[command.request_id] = reception
        self._rank.journal.tally.wait_begins(End.DESTINATION, command.request_id, reception.num_blocks, now_s)
        self._legs.setdefault(reception.transfer_id, []).extend(reception.legs)
        self._rank.journal.emit(
            End.DESTINATION,
            "registered",
            reception.transfer_id,
            direction=reception.direction.value,
            num_blocks=sum(len(group) for group in command.blocks),
            num_tokens=command.num_tokens - command.first_token,
        )
        for leg in reception.legs:
            line = self._lines.use(leg.endpoint, now_s)
            is_connected = line.greeted_us_as == leg.incarnation
            self._rank.journal.tally.peer_opens(End.DESTINATION, leg.peer_name, is_connected=is_connected)
        for leg in reception.open_legs():  # the first that fails at once takes the others along
            failure = self._register(leg, now_s)
            if failure is not None:
                self.lost(leg.endpoint, now_s, failure)
            elif leg.direction is Direction.PUSH:
                self._feed(leg, Input.OFFERS, now_s)
        self._release_unread(command.ticket, "no decode rank reads this copy", now_s)

    def _register(self, leg: Leg, now_s: float, *, is_introducing: bool = False) -> str | None:
        """None, or why nobody can be called there."""
        line = self._lines.use(leg.endpoint, now_s)
        opened = leg.reception.opened
        # Said until something was heard there, it also warns that we give up early if nothing is (`_is_unanswered`).
        is_introducing = is_introducing or line.heard_s is None
        register = Register(
            transfer_id=leg.transfer_id,
            to_engine_id=opened.ticket.engine_id,
            from_incarnation=leg.incarnation,
            direction=leg.direction,
            first_token=opened.first_token,
            num_tokens=opened.num_tokens,
            blocks=opened.blocks,
            grace_s=self._rank.deadlines.draining_s,
            num_readers=leg.num_readers,
            hello=self._rank.hello if is_introducing or line.knows_us_as != leg.incarnation else None,
            number=leg.number,
        )
        if is_introducing:
            line.greeted_us_as = None  # it does not know us, and is going to greet us as a stranger
        line.knows_us_as = leg.incarnation
        return self._lines.say(leg.endpoint, register)

    def cancelled(self, command: DestinationCancelled, now_s: float) -> None:
        reception = self._receptions.get(command.request_id)
        if reception is not None:
            self._cancel(reception, now_s, "the decode request was given up")

    def _cancel(self, reception: Reception, now_s: float, reason: str) -> None:
        for leg in reception.open_legs():
            self._feed(leg, Input.CANCEL, now_s, reason)

    def nothing_needed(self, ticket: DecodeTicket, now_s: float) -> None:
        """The prefill ranks learn at once that nobody will come for this transfer.

        vLLM also says so, under another request id, of a request whose client left: if that one is in our hands, its own
        cancellation ends it, safely.
        """
        reason = "the decode side needs nothing"
        try:
            ranks = self._producers(ticket)
        except BatonError as error:
            logger.warning("Transfer %s is not needed, but its ranks are not known: %s", ticket.transfer_id, error)
            return
        busy = {leg.endpoint for leg in self._legs.get(ticket.transfer_id, ())}
        for rank in ranks:
            if _endpoint_of(ticket, rank) not in busy:
                self._release(ticket, rank, reason, now_s)
        self._release_unread(ticket, reason, now_s)

    def _release_unread(self, ticket: DecodeTicket, reason: str, now_s: float) -> None:
        """Prefill ranks whose copy nobody takes hear so from the first of us."""
        if self._rank.hello.layout.tp_rank == 0:
            for rank in unread_by_all(self._rank.hello.layout, ticket.tp_size, ticket.pp_size):
                self._release(ticket, rank, reason, now_s)

    def _release(self, ticket: DecodeTicket, rank: int, reason: str, now_s: float) -> None:
        endpoint = _endpoint_of(ticket, rank)
        self._lines.use(endpoint, now_s)
        failure = self._lines.say(endpoint, Release(ticket.transfer_id, ticket.engine_id, reason))
        if failure is not None:
            logger.warning("Transfer %s is not needed, but nobody can be told: %s", ticket.transfer_id, failure)

    # -- the peer's side ---------------------------------------------------------------------------------------------

    def receive(self, endpoint: Endpoint, message: SideMessage, now_s: float) -> None:
        """Raises RemoteProtocolError for a message that a prefill side must not send."""
        if not isinstance(message, Accepted | Confirm | HelloWanted | Offer | SegmentPosted | Ended | Cancel):
            raise RemoteProtocolError(f"{type(message).__name__} is not for a decode side")
        line = self._lines.find(endpoint)
        if line is not None:
            line.heard_s = now_s
        leg = self._find(TransferId(message.transfer_id), endpoint)
        if leg is not None and isinstance(message, Ended | Cancel) and message.registration not in {0, leg.number}:
            return  # of an attempt before this one
        if leg is not None:
            self._hear(leg, message, now_s)
        elif isinstance(message, Confirm):
            self._lines.say(
                endpoint, Cancel(message.transfer_id, self._rank.incarnation, "nobody here wants it any more")
            )

    def _hear(self, leg: Leg, message: SideMessage, now_s: float) -> None:
        match message:
            case Accepted():
                self._accepted(leg, now_s)
            case HelloWanted() if leg.rendezvous.state in {State.OPEN, State.OFFERED}:
                self._register(leg, now_s, is_introducing=True)
            case Confirm():
                self._confirm(leg, message)
            case Offer():
                self._offered(leg, message, now_s)
            case SegmentPosted():
                leg.is_expecting = True
            case Ended():
                self._ended(leg, message, now_s)
            case Cancel():
                self._feed(
                    leg, Input.CANCEL, now_s, message.reason or "the prefill side cancelled", why=Why.PEER_GAVE_UP
                )

    def _find(self, transfer_id: TransferId, endpoint: Endpoint) -> Leg | None:
        return next((leg for leg in self._legs.get(transfer_id, ()) if leg.endpoint == endpoint), None)

    def _accepted(self, leg: Leg, now_s: float) -> None:
        leg.rendezvous.heard(now_s)
        leg.is_accepted = True
        if leg.lease_s is not None:
            # Counted from when we asked, which is before the prefill side counts from.
            asked_s = leg.renew_at_s - self._renew_interval_s
            leg.lease_until_s = max(leg.lease_until_s, asked_s + leg.lease_s)

    def _confirm(self, leg: Leg, message: Confirm) -> None:
        if leg.rendezvous.state in {State.OPEN, State.OFFERED}:
            renew = Renew(leg.transfer_id, leg.incarnation, answers=message.number, registration=leg.number)
            self._lines.say(leg.endpoint, renew)
        else:
            self._lines.say(leg.endpoint, _cancel_of(leg))

    def _ended(self, leg: Leg, message: Ended, now_s: float) -> None:
        if leg.rendezvous.state is State.DRAINING and leg.direction is Direction.PUSH:
            self._feed(leg, Input.QUIET, now_s)
        elif message.outcome is Outcome.DELIVERED and leg.direction is Direction.PUSH:
            leg.is_expecting = True  # all was written: its notifications are on their way through the transport
        else:
            leg.is_ended_by_peer = True
            reason = f"the prefill side ended the transfer: {message.outcome.value}"
            reason = f"{reason} ({message.reason})" if message.reason else reason
            self._feed(leg, Input.FAIL, now_s, reason, why=Why.told(message.outcome), told=message.outcome)

    def arrived(self, sender: AgentName, notification: Notification, now_s: float) -> None:
        """A notification came through the transport. Raises RemoteProtocolError when its sender has no business with it."""
        if isinstance(notification, Greeting):
            self._greeted(sender)
            return
        leg = self._receiver_of(sender, notification)
        if leg is None or leg.rendezvous.state not in {State.OFFERED, State.DRAINING}:
            return
        is_news = leg.receipt.add(
            generation=notification.generation, segment=notification.segment, is_last=notification.is_last
        )
        if not is_news:
            return
        self._rank.journal.emit(
            End.DESTINATION, "segment_arrived", leg.transfer_id, segment=notification.segment, peer=leg.peer_name
        )
        leg.is_expecting = False
        self._rank.journal.tally.peer_connects(End.DESTINATION, leg.peer_name)
        leg.rendezvous.heard(now_s)
        if leg.receipt.is_complete:
            self._feed(leg, Input.COMPLETE, now_s)

    def _receiver_of(self, sender: AgentName, landed: SegmentLanded) -> Leg | None:
        for leg in self._legs.get(TransferId(landed.transfer_id), ()):
            is_its = landed.registration in {0, leg.number}
            if is_its and is_agent_of(sender, leg.reception.opened.ticket.engine_id, leg.rank):
                return leg
        return None

    def _greeted(self, sender: AgentName) -> None:
        for leg in self._all_legs():
            line = self._lines.find(leg.endpoint)
            is_its = is_agent_of(sender, leg.reception.opened.ticket.engine_id, leg.rank)
            if is_its and line is not None and line.greeted_us_as != leg.incarnation:
                line.greeted_us_as = leg.incarnation
                self._rank.journal.tally.peer_connects(End.DESTINATION, leg.peer_name)
                self._lines.say(leg.endpoint, Connected())

    def _all_legs(self) -> Iterator[Leg]:
        return (leg for legs in list(self._legs.values()) for leg in list(legs))

    # -- reading (pull) ----------------------------------------------------------------------------------------------

    def _offered(self, leg: Leg, offer: Offer, now_s: float) -> None:
        if leg.direction is not Direction.PULL or leg.rendezvous.state is not State.OPEN:
            return
        opened, hello = leg.reception.opened, offer.hello
        is_asked = (hello.engine_id, hello.rank) == (opened.ticket.engine_id, leg.rank)
        if is_asked and offer.num_tokens != opened.num_tokens:
            reason = f"the prompt has {opened.num_tokens} tokens here and {offer.num_tokens} at the prefill side"
            self._feed(leg, Input.FAIL, now_s, reason, why=Why.MISMATCH)
            return
        try:
            if not is_asked:
                raise RemoteProtocolError(
                    f"engine {hello.engine_id} rank {hello.rank} answers for {opened.ticket.engine_id} rank {leg.rank}"
                )
            peer = self._rank.peers.greet(hello, End.DESTINATION, now_s)
        except BatonError as error:
            self._rank.journal.no_handshake()
            self._feed(leg, Input.FAIL, now_s, str(error), why=Why.of(error))
            return
        peer.num_transfers += 1
        move = leg.move = self._rank.new_move(
            Operation.READ,
            leg.transfer_id,
            leg.rendezvous,
            peer,
            their_blocks=offer.blocks,
            first_token=opened.first_token,
            num_tokens=opened.num_tokens,
        )
        move.our_blocks = opened.blocks
        # P counts from when it sent the offer, a little earlier; its drain after the lease's end is far longer than that.
        leg.lease_s, leg.lease_until_s = offer.lease_s, now_s + offer.lease_s
        self._feed(leg, Input.POSTS, now_s)
        move.segments.advance(offer.num_tokens, is_final=True, generation=0)
        self._pump(leg, move, now_s)

    def _pump(self, leg: Leg, move: Move, now_s: float) -> None:
        try:
            self._rank.mover.pump(move)
        except BatonError as error:
            self._feed(leg, Input.FAIL, now_s, str(error), why=Why.of(error))
            return
        self._maybe_complete(leg, now_s)

    def settled(self, settled: Settled, now_s: float) -> None:
        """The transport is done with a READ of ours."""
        for leg in list(self._legs.get(settled.move.transfer_id, ())):
            if leg.move is not settled.move:
                continue
            if settled.failure is not None:
                self._feed(leg, Input.FAIL, now_s, settled.failure, why=Why.NOT_MOVED)
            else:
                self._rank.carried(End.DESTINATION, settled.move.peer, now_s)
                leg.rendezvous.moved(now_s)
                self._pump(leg, settled.move, now_s)
            if leg.rendezvous.state is State.DRAINING and leg.num_in_flight == 0:
                self._feed(leg, Input.QUIET, now_s)

    def _maybe_complete(self, leg: Leg, now_s: float) -> None:
        if leg.rendezvous.state is not State.POSTING or leg.move is None:
            return
        if now_s > leg.lease_until_s:
            reason = "the prefill side's lease ended before the blocks were read"
            self._feed(leg, Input.FAIL, now_s, reason, why=Why.LEASE_ENDED)
        elif leg.move.segments.is_complete:
            self._rank.mover.completed(leg.move)
            self._feed(leg, Input.COMPLETE, now_s)

    # -- time, loss, and the machines' effects -----------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        for leg in self._all_legs():
            if leg.rendezvous.is_closed:
                continue
            if leg.incarnation != self._rank.incarnation:
                self._cut_off(leg, now_s)
            elif leg.rendezvous.is_overdue(now_s):
                self._feed(leg, Input.EXPIRE, now_s, f"no progress while {leg.rendezvous.state.value}")
            elif self._is_unanswered(leg, now_s):
                why = self._rank.channel.suspicion(leg.endpoint) or "nobody answers at that address"
                self.lost(leg.endpoint, now_s, why)
            elif now_s >= leg.renew_at_s:
                leg.renew_at_s = now_s + self._renew_interval_s
                self._remind(leg)
        for key, waited_s in self._rank.journal.tally.long_waits(End.DESTINATION, now_s):
            leg = next(self._receptions[RequestId(key)].open_legs())
            wait = leg.wait(waited_s, self._lines.find(leg.endpoint), now_s)
            self._rank.journal.waiting(decode_sentence(wait), waited_s)
        self._lines.forget_idle((leg.endpoint for leg in self._all_legs()), now_s)

    def _cut_off(self, leg: Leg, now_s: float) -> None:
        """Our transport was opened anew since: whatever was on its way to us for this leg will not come."""
        is_draining = leg.rendezvous.state is State.DRAINING
        reason = "the transport was opened anew, to fence off another peer that fell silent"
        self._feed(leg, Input.QUIET if is_draining else Input.FAIL, now_s, reason, why=Why.CUT_OFF)

    def _remind(self, leg: Leg) -> None:
        """The prefill side hears of us; of a leg that we gave up, that we did: the first time may have been lost."""
        if leg.rendezvous.state is State.DRAINING and leg.direction is Direction.PUSH:
            self._tell(leg, _cancel_of(leg))
        else:
            lacks_offer = leg.direction is Direction.PULL and leg.rendezvous.state is State.OPEN
            self._tell(leg, Renew(leg.transfer_id, leg.incarnation, lacks_offer=lacks_offer, registration=leg.number))

    def _is_unanswered(self, leg: Leg, now_s: float) -> bool:
        line = self._lines.find(leg.endpoint)
        return line is not None and line.heard_s is None and now_s >= leg.unanswered_at_s

    def lost(self, endpoint: Endpoint, now_s: float, why: str, *, what: str = "is gone") -> None:
        """The process behind `endpoint` is gone: nothing of it can reach us any more, and its transfers fail now."""
        self._lines.forget(endpoint)
        for leg in self._all_legs():
            if leg.endpoint == endpoint and not leg.rendezvous.is_closed:
                reason = f"the prefill side at {endpoint.host}:{endpoint.port} {what}: {why}"
                self._feed(leg, Input.LOST, now_s, reason)

    def _feed(
        self,
        leg: Leg,
        what: Input,
        now_s: float,
        reason: str = "",
        *,
        why: Why | None = None,
        told: Outcome | None = None,
    ) -> None:
        rendezvous = leg.rendezvous
        if rendezvous.state is State.DRAINING and leg.move is not None and leg.num_in_flight:
            # Neither a clock nor a peer's end stops an operation of ours: it is over when its handle is (`settled`).
            if what in {Input.EXPIRE, Input.LOST}:
                self._rank.give_up(leg.move, now_s)
            return
        for effect in self._rank.journal.feed(leg, what, now_s, reason, why=why, told=told):
            match effect:
                case Effect.STOP_POSTING:
                    self._stop(leg, now_s)
                case Effect.TELL_CANCEL:
                    self._tell(leg, _cancel_of(leg))
                case Effect.TELL_ENDED:
                    self._tell_ended(leg)
                case Effect.FORGET_PEER:
                    self._forget(leg)
                case Effect.FENCE_PEER:
                    self._fence(leg)
                case Effect.REPORT:
                    self._closed(leg, now_s)

    def _tell_ended(self, leg: Leg) -> None:
        """Whoever ended it knows; it may only have refused us, and still have the transfer for another attempt."""
        rendezvous = leg.rendezvous
        if not leg.is_ended_by_peer:
            outcome = rendezvous.outcome or Outcome.FAILED
            self._tell(leg, Ended(leg.transfer_id, leg.incarnation, outcome, rendezvous.reason, leg.number))

    def _tell(self, leg: Leg, message: SideMessage) -> None:
        if leg.endpoint in self._lines:  # else it is gone: calling again would only leave a socket behind
            self._lines.say(leg.endpoint, message)

    def _stop(self, leg: Leg, now_s: float) -> None:
        if leg.move is not None:
            leg.move.is_stopped = True
        if leg.num_in_flight == 0:
            self._feed(leg, Input.QUIET, now_s)

    def _forget(self, leg: Leg) -> None:
        """After this the peer must introduce itself anew before anything of it is believed."""
        self._lines.forget(leg.endpoint)
        if leg.move is not None:
            self._rank.peers.forget(leg.move.peer)

    def _fence(self, leg: Leg) -> None:
        """A silent writer cannot reach our memory any more. A reader (pull) has stopped by itself: its handles are gone."""
        self._forget(leg)
        if leg.direction is Direction.PUSH and leg.incarnation == self._rank.incarnation:
            logger.warning(
                "The prefill rank at %s has been silent since transfer %s was given up. The transport is opened anew, so "
                "that nothing it may have begun can land; transfers in flight here fail and are computed again.",
                leg.endpoint.address, leg.transfer_id,
            )  # fmt: skip
            self._rank.fence(Fenced.SILENT_WRITER)

    def _closed(self, leg: Leg, now_s: float) -> None:
        """A leg came to its end; one that did not deliver takes its siblings along."""
        reception, rendezvous = leg.reception, leg.rendezvous
        self._rank.journal.tally.peer_closes(End.DESTINATION, leg.peer_name)
        self._legs[leg.transfer_id].remove(leg)
        if not self._legs[leg.transfer_id]:
            del self._legs[leg.transfer_id]
        if leg.move is not None:
            leg.move.peer.leave(now_s)
        if leg.endpoint in self._lines:
            self._lines.use(leg.endpoint, now_s)
        if rendezvous.outcome is not Outcome.DELIVERED and reception.failure is None:
            reception.failure = rendezvous.outcome or Outcome.FAILED, rendezvous.reason
            self._cancel(reception, now_s, rendezvous.reason)
        if reception.is_over and self._receptions.pop(reception.opened.request_id, None) is not None:
            self._report(reception)

    def _report(self, reception: Reception) -> None:
        outcome, reason = reception.failure or (Outcome.DELIVERED, "")
        self._rank.journal.tally.wait_ends(End.DESTINATION, reception.opened.request_id)
        self._rank.journal.ended(
            End.DESTINATION,
            reception.transfer_id,
            outcome,
            direction=reception.direction,
            reason=reason,
            num_bytes=reception.num_bytes,
        )
        self._rank.results.received(reception.opened.request_id, None if outcome is Outcome.DELIVERED else reason)

    # -- what the loop needs to know ---------------------------------------------------------------------------------

    def is_expecting(self, now_s: float) -> bool:
        """Something may come through the transport at any moment, so it should be looked at often."""
        return any(
            leg.is_expecting or (leg.direction is Direction.PUSH and self._is_connecting(leg, now_s))
            for leg in self._all_legs()
        )

    def _is_connecting(self, leg: Leg, now_s: float) -> bool:
        line = self._lines.find(leg.endpoint)
        is_new = line is not None and line.greeted_us_as != leg.incarnation
        return is_new and now_s < leg.unanswered_at_s

    def __len__(self) -> int:
        return len(self._receptions)


def _cancel_of(leg: Leg) -> Cancel:
    return Cancel(leg.transfer_id, leg.incarnation, leg.rendezvous.reason, leg.number)


def _endpoint_of(ticket: DecodeTicket, rank: int) -> Endpoint:
    """The ticket names rank 0's port, and rank r listens on the r-th after it."""
    return Endpoint(ticket.host, ticket.port + rank)

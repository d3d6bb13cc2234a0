"""The prefill end of transfers: waits for both the request's KV and the decode side's registration, in either order.

Push: our blocks are written to the destination as they become final. Pull: they are offered when all are final, and held
until the decode side says it has read them. Invariant: a request the engine holds blocks for is reported `sent` exactly
once, when its transfer is closed and no handle of ours is in flight. Next: destination.py.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

import msgspec

from kvbaton.errors import BatonError, PeerLost, RemoteProtocolError
from kvbaton.protocol.messages import (
    Accepted,
    Cancel,
    Connected,
    Ended,
    Greeting,
    HelloWanted,
    Offer,
    Register,
    Release,
    Renew,
    SegmentPosted,
    SideMessage,
    encode,
)
from kvbaton.protocol.remembered import Remembered
from kvbaton.protocol.rendezvous import Effect, Input, Rendezvous, State
from kvbaton.protocol.segments import Segments
from kvbaton.runtime.events import SourceAdvanced, SourceFinished, SourceOpened, SourceRevoked
from kvbaton.runtime.mover import Move, Settled
from kvbaton.runtime.peers import Peer
from kvbaton.runtime.rank import Rank
from kvbaton.runtime.sidechannel import Caller
from kvbaton.transport.base import Operation
from kvbaton.types import Direction, Outcome, RequestId, TransferId

logger = logging.getLogger("vllm.kvbaton")

READ_WATCH_S = 1.0
"""How long after an offer we expect the reader to be at work, and keep our half of the transport going for it."""


@dataclass
class Destination:
    """Where the KV is wanted, as registered."""

    register: Register
    peer: Peer
    caller: Caller


@dataclass
class SourceTransfer:
    transfer_id: TransferId
    rendezvous: Rendezvous
    request_id: RequestId | None = None
    destination: Destination | None = None
    frontier: SourceAdvanced | None = None
    move: Move | None = None
    is_engine_done: bool = False
    """The engine has finished the request; what it holds now, it holds for us."""
    is_held: bool = False
    offered_s: float | None = None
    awaits_release: threading.Event | None = None
    """Somebody wants the blocks back and waits for our handles."""

    @property
    def is_computing(self) -> bool:
        return self.request_id is not None and not self.is_engine_done

    @property
    def num_in_flight(self) -> int:
        return 0 if self.move is None else self.move.num_in_flight


class SourceEnd:
    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._transfers: dict[TransferId, SourceTransfer] = {}
        self._remembered = Remembered()

    # -- the engine's side -------------------------------------------------------------------------------------------

    def opened(self, command: SourceOpened, now_s: float) -> None:
        if self._remembered.recall(command.transfer_id, now_s) is not None:
            return  # cancelled or not needed before it came here: its blocks will be given back as soon as it finishes
        transfer = self._find_or_open(command.transfer_id, now_s)
        if transfer.request_id is not None:
            logger.warning(
                "Request %s names transfer %s, which request %s already feeds; it will hand nothing off.",
                command.request_id, command.transfer_id, transfer.request_id,
            )  # fmt: skip
            return
        transfer.request_id = command.request_id
        transfer.rendezvous.heard(now_s)

    def advanced(self, command: SourceAdvanced, now_s: float) -> None:
        transfer = self._of_request(command.transfer_id, command.request_id)
        if transfer is None:
            return
        transfer.frontier = command
        transfer.rendezvous.heard(now_s)
        self._rank.source_trace.emit(
            "source_advanced", transfer.transfer_id, num_tokens=command.num_tokens, last=command.is_last
        )
        self._match(transfer, now_s)

    def revoked(self, command: SourceRevoked, now_s: float) -> None:
        """Nothing more is posted from the blocks; what is in flight ends first, and an offer of them is taken back."""
        transfer = self._of_request(command.transfer_id, command.request_id)
        if transfer is None:
            command.released.set()
            return
        transfer.frontier = None
        if transfer.rendezvous.state is State.OFFERED:
            self._feed(transfer, Input.CANCEL, now_s, "the prefill request was preempted while its blocks were read")
        if transfer.num_in_flight or transfer.rendezvous.state is State.DRAINING:
            transfer.awaits_release = command.released
        else:
            command.released.set()

    def finished(self, command: SourceFinished, now_s: float) -> None:
        transfer = self._of_request(command.transfer_id, command.request_id)
        if transfer is None:
            # Closed before the engine finished (cancelled, failed, or delivered early): nothing is in flight.
            if command.is_held:
                self._rank.results.sent(command.request_id)
            return
        transfer.is_engine_done = True
        transfer.is_held = command.is_held
        transfer.rendezvous.heard(now_s)
        if command.is_aborted:
            self._feed(transfer, Input.CANCEL, now_s, "the prefill request was aborted")

    def _of_request(self, transfer_id: TransferId, request_id: RequestId) -> SourceTransfer | None:
        transfer = self._transfers.get(transfer_id)
        return transfer if transfer is not None and transfer.request_id == request_id else None

    def _find_or_open(self, transfer_id: TransferId, now_s: float) -> SourceTransfer:
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            transfer = SourceTransfer(transfer_id, Rendezvous(self._rank.deadlines, now_s))
            self._transfers[transfer_id] = transfer
        return transfer

    # -- the peer's side ---------------------------------------------------------------------------------------------

    def receive(self, caller: Caller, message: SideMessage, now_s: float) -> None:
        """Raises RemoteProtocolError for a message that a decode side must not send."""
        match message:
            case Register():
                self._registered(caller, message, now_s)
            case Renew():
                self._renewed(caller, message, now_s)
            case Cancel():
                self._cancelled(caller, message, now_s)
            case Release():
                self._released(message, now_s)
            case Ended():
                self._ended(caller, message, now_s)
            case Connected():
                self._connected(caller, now_s)
            case _:
                raise RemoteProtocolError(f"{type(message).__name__} is not for a prefill side")

    def _registered(self, caller: Caller, register: Register, now_s: float) -> None:
        transfer_id = TransferId(register.transfer_id)
        refusal = self._why_not(register, now_s)
        if refusal is not None:
            self._say(caller, Ended(transfer_id, *refusal))
            return
        try:
            peer = self._rank.peers.find(register.from_incarnation) if register.hello is None else self._greet(register)
        except BatonError as error:
            logger.warning("Transfer %s refused: %s", transfer_id, error)
            self._say(caller, Ended(transfer_id, Outcome.FAILED, str(error)))
            return
        if peer is None:
            self._say(caller, HelloWanted(transfer_id))
            return
        known = self._transfers[transfer_id].destination if transfer_id in self._transfers else None
        if known is not None and (known.peer is not peer or not _is_same(known.register, register)):
            self._say(caller, Ended(transfer_id, Outcome.FAILED, "another request already receives this transfer"))
            return
        if not self._say(caller, Accepted(transfer_id)):
            # It hung up while its registration lay here unread: the blocks may be somebody else's by now.
            return
        transfer = self._find_or_open(transfer_id, now_s)
        transfer.destination = Destination(register, peer, caller)
        if known is None:
            self._rank.source_trace.emit("destination_known", transfer_id, direction=register.direction.value)
        self._match(transfer, now_s)

    def _why_not(self, register: Register, now_s: float) -> tuple[Outcome, str] | None:
        if register.to_engine_id != self._rank.engine_id:
            return Outcome.FAILED, f"this is engine {self._rank.engine_id}, not {register.to_engine_id}"
        memory = self._remembered.recall(TransferId(register.transfer_id), now_s)
        if memory is None:
            return None
        if memory.outcome is Outcome.DELIVERED:
            return Outcome.FAILED, "this transfer was delivered before; a new request needs a new transfer_id"
        return memory.outcome, memory.reason

    def _greet(self, register: Register) -> Peer:
        hello = register.hello
        if hello is None or hello.incarnation != register.from_incarnation:
            raise RemoteProtocolError("the introduction does not belong to the registration's sender")
        peer = self._rank.peers.greet(hello, self._rank.clock())
        self._rank.transport.notify(peer.agent, encode(Greeting()))
        return peer

    def _renewed(self, caller: Caller, message: Renew, now_s: float) -> None:
        transfer_id = TransferId(message.transfer_id)
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            if transfer.destination is None or transfer.destination.caller != caller:
                # Its registration was lost or dropped, or came by a connection that is gone.
                self._say(caller, HelloWanted(transfer_id))
                return
            if transfer.request_id is not None:
                transfer.rendezvous.heard(now_s)
            self._say(caller, Accepted(transfer_id))
            return
        memory = self._remembered.recall(transfer_id, now_s)
        if memory is None:
            self._say(caller, Ended(transfer_id, Outcome.FAILED, "this transfer is not known here"))
        else:
            self._say(caller, Ended(transfer_id, memory.outcome, memory.reason))

    def _cancelled(self, caller: Caller, message: Cancel, now_s: float) -> None:
        transfer_id, reason = TransferId(message.transfer_id), message.reason or "cancelled by the decode side"
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            self._feed(transfer, Input.CANCEL, now_s, reason)
        else:
            self._remembered.add(transfer_id, Outcome.CANCELLED, reason, now_s)
        if transfer is None or transfer.destination is None:
            # Nothing of ours was ever going to touch the caller's blocks.
            self._say(caller, Ended(transfer_id, Outcome.CANCELLED, reason))

    def _released(self, message: Release, now_s: float) -> None:
        """Before anybody registered, or in its place. A registered destination ends its transfer by Cancel or Ended."""
        if message.to_engine_id != self._rank.engine_id:
            return
        transfer = self._transfers.get(TransferId(message.transfer_id))
        if transfer is None:
            self._remembered.add(TransferId(message.transfer_id), Outcome.CANCELLED, message.reason, now_s)
        elif transfer.destination is None:
            self._feed(transfer, Input.CANCEL, now_s, message.reason)

    def _ended(self, caller: Caller, message: Ended, now_s: float) -> None:
        transfer = self._transfers.get(TransferId(message.transfer_id))
        if transfer is None or transfer.destination is None or transfer.destination.caller != caller:
            return
        if transfer.rendezvous.state is State.DRAINING:
            self._feed(transfer, Input.QUIET, now_s)
        elif message.outcome is Outcome.DELIVERED and transfer.rendezvous.state is not State.POSTING:
            self._feed(transfer, Input.COMPLETE, now_s)
        else:
            self._feed(transfer, Input.FAIL, now_s, message.reason)

    def _connected(self, caller: Caller, now_s: float) -> None:
        for transfer in self._transfers.values():
            if transfer.destination is not None and transfer.destination.caller == caller:
                transfer.destination.peer.connecting_until_s = now_s

    # -- moving ------------------------------------------------------------------------------------------------------

    def _match(self, transfer: SourceTransfer, now_s: float) -> None:
        """Starts or continues the move as far as both ends are known."""
        destination, frontier = transfer.destination, transfer.frontier
        if destination is None or frontier is None or transfer.rendezvous.state not in {State.OPEN, State.POSTING}:
            return
        register = destination.register
        if frontier.is_last and frontier.num_tokens != register.num_tokens:
            reason = f"the prompt has {frontier.num_tokens} tokens here and {register.num_tokens} at the decode side"
            self._feed(transfer, Input.FAIL, now_s, reason)
            return
        if register.direction is Direction.PULL:
            if frontier.is_last:
                self._offer(transfer, destination, frontier, now_s)
            return
        if transfer.move is None:
            transfer.move = self._new_move(transfer, destination)
            self._feed(transfer, Input.POSTS, now_s)
        if frontier.generation > transfer.move.segments.generation and transfer.num_in_flight:
            return  # a preempted prefill starts over; what it sent before lands first (`settled` comes back here)
        transfer.move.our_blocks = frontier.blocks
        transfer.move.segments.advance(frontier.num_tokens, is_final=frontier.is_last, generation=frontier.generation)
        self._pump(transfer, transfer.move, now_s)

    def _new_move(self, transfer: SourceTransfer, destination: Destination) -> Move:
        return Move(
            transfer_id=transfer.transfer_id,
            rendezvous=transfer.rendezvous,
            operation=Operation.WRITE,
            peer=destination.peer,
            segments=Segments(destination.register.first_token, self._rank.alignment_tokens),
            their_blocks=destination.register.blocks,
        )

    def _pump(self, transfer: SourceTransfer, move: Move, now_s: float) -> None:
        try:
            num_posted = self._rank.mover.pump(move)
        except BatonError as error:
            self._feed(transfer, Input.FAIL, now_s, str(error))
            return
        if num_posted:
            transfer.rendezvous.moved(now_s)
            self._tell(transfer, SegmentPosted(transfer.transfer_id))
        self._maybe_complete(transfer, now_s)

    def _maybe_complete(self, transfer: SourceTransfer, now_s: float) -> None:
        if (
            transfer.rendezvous.state is State.POSTING
            and transfer.move is not None
            and transfer.move.segments.is_complete
        ):
            self._feed(transfer, Input.COMPLETE, now_s)

    def _offer(
        self, transfer: SourceTransfer, destination: Destination, frontier: SourceAdvanced, now_s: float
    ) -> None:
        self._feed(transfer, Input.OFFERS, now_s)
        transfer.offered_s = now_s
        self._say(
            destination.caller,
            Offer(
                transfer.transfer_id,
                num_tokens=frontier.num_tokens,
                blocks=frontier.blocks,
                lease_s=self._rank.deadlines.offered_s,
                hello=self._rank.hello,
            ),
        )

    def settled(self, transfer_id: TransferId, settled: Settled, now_s: float) -> None:
        """The transport is done with a segment of ours."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.move is not settled.move:
            return
        if transfer.awaits_release is not None and transfer.num_in_flight == 0:
            transfer.awaits_release.set()
        if settled.failure is not None:
            self._feed(transfer, Input.FAIL, now_s, settled.failure)
        else:
            settled.move.peer.connecting_until_s = now_s
            transfer.rendezvous.moved(now_s)
            # Before looking further: what is complete is delivered, whatever a preempted prefill computes again.
            self._maybe_complete(transfer, now_s)
            self._match(transfer, now_s)
        if transfer.rendezvous.state is State.DRAINING and transfer.num_in_flight == 0:
            self._feed(transfer, Input.QUIET, now_s)

    # -- time, and the machine's effects -----------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        for transfer in list(self._transfers.values()):
            if not transfer.rendezvous.is_overdue(now_s):
                continue
            is_waiting = transfer.rendezvous.state in {State.OPEN, State.POSTING} and transfer.num_in_flight == 0
            if is_waiting and transfer.is_computing:
                # The engine owns the request's life while it queues and computes, also between two chunks.
                transfer.rendezvous.moved(now_s)
                continue
            self._feed(transfer, Input.EXPIRE, now_s, self._why_overdue(transfer))

    def _why_overdue(self, transfer: SourceTransfer) -> str:
        if transfer.request_id is None:
            return "no prefill request of this transfer arrived in time"
        if transfer.destination is None:
            return "no decode side registered before the lease ended"
        return f"no progress while {transfer.rendezvous.state.value}"

    def _feed(self, transfer: SourceTransfer, what: Input, now_s: float, reason: str = "") -> None:
        if transfer.rendezvous.state is State.DRAINING and transfer.move is not None and transfer.num_in_flight:
            # Neither a clock nor a peer's word stops an operation of ours: it is over when its handle is (`settled`).
            if what is Input.EXPIRE and self._rank.mover.abandon(transfer.move):
                self._rank.peers.forget(transfer.move.peer)
            return
        for effect in transfer.rendezvous.handle(what, now_s, reason):
            match effect:
                case Effect.STOP_POSTING:
                    self._stop(transfer, now_s)
                case Effect.TELL_CANCEL:
                    self._tell(transfer, Cancel(transfer.transfer_id, transfer.rendezvous.reason))
                case Effect.TELL_ENDED:
                    self._tell_ended(transfer)
                case Effect.FENCE_PEER:
                    if transfer.destination is not None:
                        self._rank.peers.forget(transfer.destination.peer)
                case Effect.REPORT:
                    self._report(transfer, now_s)

    def _stop(self, transfer: SourceTransfer, now_s: float) -> None:
        if transfer.move is not None:
            transfer.move.is_stopped = True
        if transfer.num_in_flight == 0:
            self._feed(transfer, Input.QUIET, now_s)

    def _tell_ended(self, transfer: SourceTransfer) -> None:
        outcome = transfer.rendezvous.outcome or Outcome.FAILED
        if outcome is not Outcome.DELIVERED:
            self._tell(transfer, Ended(transfer.transfer_id, outcome, transfer.rendezvous.reason))

    def _report(self, transfer: SourceTransfer, now_s: float) -> None:
        outcome, reason = transfer.rendezvous.outcome or Outcome.FAILED, transfer.rendezvous.reason
        del self._transfers[transfer.transfer_id]
        if transfer.awaits_release is not None:
            transfer.awaits_release.set()
        self._remembered.add(transfer.transfer_id, outcome, reason, now_s)
        if transfer.is_held and transfer.request_id is not None:
            self._rank.results.sent(transfer.request_id)
        self._rank.source_trace.emit("closed", transfer.transfer_id, outcome=outcome.value, reason=reason)
        if outcome is not Outcome.DELIVERED:
            logger.info("Transfer %s ended at the prefill side: %s (%s)", transfer.transfer_id, outcome.value, reason)

    def _tell(self, transfer: SourceTransfer, message: SideMessage) -> None:
        if transfer.destination is not None:
            self._say(transfer.destination.caller, message)

    def _say(self, caller: Caller, message: SideMessage) -> bool:
        """False when nobody is there to hear it."""
        try:
            self._rank.channel.send(caller, encode(message))
        except PeerLost as error:
            # Its transfers end by their own deadlines, or by the transport failing to reach it.
            logger.debug("A decode side left before it got %s: %s", type(message).__name__, error)
            return False
        return True

    # -- what the loop needs to know ---------------------------------------------------------------------------------

    @property
    def has_offered(self) -> bool:
        return any(transfer.offered_s is not None for transfer in self._transfers.values())

    def is_being_read(self, now_s: float) -> bool:
        return any(
            transfer.offered_s is not None and now_s < transfer.offered_s + READ_WATCH_S
            for transfer in self._transfers.values()
        )

    def __len__(self) -> int:
        return len(self._transfers)


def _is_same(known: Register, again: Register) -> bool:
    """The same registration, said twice; only the first need carry the introduction."""
    return msgspec.structs.replace(known, hello=None) == msgspec.structs.replace(again, hello=None)

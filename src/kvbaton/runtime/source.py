"""The prefill end of transfers: waits for both the request's KV and the decode side's registrations, in either order.

Push: our blocks are written to the readers as they become final. Pull: they are offered when all are final, and held until
the readers say they have read them. Invariant: a request the engine holds blocks for is reported `sent` exactly once, when
its transfer is over and no handle of ours is in flight. Next: destination.py.
"""

from __future__ import annotations

import logging

import msgspec

from kvbaton.errors import BatonError, RemoteProtocolError, one_line
from kvbaton.geometry.layout import check_blocks
from kvbaton.protocol.messages import (
    Accepted,
    Cancel,
    Connected,
    Ended,
    Greeting,
    HelloWanted,
    Register,
    Release,
    Renew,
    SideMessage,
    encode,
)
from kvbaton.protocol.remembered import Memory, Remembered
from kvbaton.protocol.rendezvous import Effect, Input, Rendezvous, State
from kvbaton.runtime.events import SourceAdvanced, SourceFinished, SourceOpened, SourceRevoked
from kvbaton.runtime.metrics import REFUSED, Why
from kvbaton.runtime.mover import Settled
from kvbaton.runtime.peers import Peer
from kvbaton.runtime.rank import Rank
from kvbaton.runtime.seldom import Seldom
from kvbaton.runtime.serving import Serving
from kvbaton.runtime.sidechannel import Caller
from kvbaton.runtime.source_transfer import NEVER_S, Reader, SourceTransfer
from kvbaton.runtime.waiting import prefill_sentence
from kvbaton.types import Direction, End, Outcome, RequestId, TransferId

logger = logging.getLogger("vllm.kvbaton")

MAX_TRANSFERS_PER_READER = 4096
"""Open at once from one decode rank, which holds blocks for each of them. Its registrations may be for requests that never
come."""

MAX_LOGGED_CHARACTERS = 500

_TAKEN = "another request already receives this transfer"

READ_WATCH_S = 1.0
"""How long after an offer we expect the reader to be at work, and keep our half of the transport going for it."""


class SourceEnd:
    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._transfers: dict[TransferId, SourceTransfer] = {}
        self._remembered = Remembered()
        self._said_no = Remembered()
        self._refused = Seldom(rank.clock)
        self._serving = Serving(rank, self._reader_closed)

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
        for reader in transfer.open_readers():
            self._peer_opens(reader)
        self._rank.journal.tally.wait_ends(End.SOURCE, transfer.transfer_id)
        self._heard_of_engine(transfer, now_s)

    def advanced(self, command: SourceAdvanced, now_s: float) -> None:
        transfer = self._of_request(command.transfer_id, command.request_id)
        if transfer is None:
            return
        transfer.frontier = command
        self._note_held(transfer, now_s)
        self._heard_of_engine(transfer, now_s)
        self._rank.journal.emit(
            End.SOURCE, "source_advanced", transfer.transfer_id, num_tokens=command.num_tokens, last=command.is_last
        )
        for reader in transfer.open_readers():
            self._serving.match(transfer, reader, now_s)

    def revoked(self, command: SourceRevoked, now_s: float) -> None:
        """Nothing more is posted from the blocks, and what is in flight ends first. They are not offered to be read yet:
        that waits until the engine is done with the request (`Serving.match`).
        """
        transfer = self._of_request(command.transfer_id, command.request_id)
        if transfer is None:
            command.released.set()
            return
        transfer.frontier = None
        transfer.awaits_release = command.released
        self._maybe_release(transfer)

    def finished(self, command: SourceFinished, now_s: float) -> None:
        transfer = self._of_request(command.transfer_id, command.request_id)
        if transfer is None:
            # Closed before the engine finished (cancelled, failed, or delivered early): nothing is in flight.
            if command.is_held:
                self._rank.results.sent(command.request_id)
            return
        transfer.is_engine_done = True
        transfer.is_held = command.is_held
        self._note_held(transfer, now_s)
        self._heard_of_engine(transfer, now_s)
        if command.is_aborted:
            self._cancel_all(transfer, now_s, "the prefill request was aborted")
        for reader in transfer.open_readers():
            self._serving.match(transfer, reader, now_s)

    def _peer_opens(self, reader: Reader) -> None:
        """Not before the request is here: the engine may have nothing else to do, and then would tell of it for ever."""
        self._rank.journal.tally.peer_opens(End.SOURCE, reader.peer_name, is_connected=reader.peer.is_connected)

    def _note_held(self, transfer: SourceTransfer, now_s: float) -> None:
        """The engine says that it is done before the device is: the last blocks may come to be known afterwards."""
        if transfer.is_held:
            self._rank.journal.tally.wait_begins(End.SOURCE, transfer.transfer_id, transfer.num_blocks, now_s)

    def _of_request(self, transfer_id: TransferId, request_id: RequestId) -> SourceTransfer | None:
        transfer = self._transfers.get(transfer_id)
        return transfer if transfer is not None and transfer.request_id == request_id else None

    def _find_or_open(self, transfer_id: TransferId, now_s: float) -> SourceTransfer:
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            transfer = SourceTransfer(transfer_id, Rendezvous(self._rank.deadlines, now_s), now_s)
            self._transfers[transfer_id] = transfer
        return transfer

    def _heard_of_engine(self, transfer: SourceTransfer, now_s: float) -> None:
        transfer.claim.heard(now_s)
        for reader in transfer.open_readers():
            reader.rendezvous.heard(now_s)

    def _cancel_all(self, transfer: SourceTransfer, now_s: float, reason: str) -> None:
        for reader in transfer.open_readers():
            self._serving.feed(transfer, reader, Input.CANCEL, now_s, reason)
        self._close_claim(transfer, Input.CANCEL, now_s, reason)

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
            self._rank.journal.tally.count(REFUSED, self._why_refused(register))
            self._say_no(caller, register, *refusal, now_s)
            return
        try:
            peer = self._greet(register, now_s)
            if peer is not None:
                check_blocks(peer.hello.layout, register.blocks)
        except BatonError as error:
            self._refuse(caller, register, error, now_s)
            return
        if peer is None:
            self._serving.say(caller, HelloWanted(transfer_id))
            return
        known = self._transfers.get(transfer_id)
        reader = None if known is None else known.readers.get(register.from_incarnation)
        if reader is None and peer.num_transfers >= MAX_TRANSFERS_PER_READER:
            reason = f"{peer.num_transfers} transfers from this decode rank are open here, and more are not taken"
            self._rank.journal.tally.count(REFUSED, Why.TOO_MANY)
            self._say_no(caller, register, Outcome.FAILED, reason, now_s)
            return
        if not self._serving.say(caller, Accepted(transfer_id)):
            # It hung up while its registration lay here unread: the blocks may be somebody else's by now.
            return
        transfer = self._find_or_open(transfer_id, now_s)
        if reader is None:
            reader = Reader(register, peer, caller, Rendezvous(self._rank.deadlines, now_s), heard_s=NEVER_S)
            self._join(transfer, reader, now_s)
        if register.hello is None:
            self._serving.heard(reader, caller, now_s)
        else:
            # It may have waited long for a connection, and whoever gets no answer at all gives up early: it is asked first,
            # best while there is nothing to write yet.
            reader.caller = caller
            if transfer.frontier is None and register.direction is Direction.PUSH:
                self._serving.ask(reader, now_s)
        self._serving.match(transfer, reader, now_s)

    def _join(self, transfer: SourceTransfer, reader: Reader, now_s: float) -> None:
        """One more of those that the transfer is for; with the last of them nobody else is waited for."""
        register, peer = reader.register, reader.peer
        peer.num_transfers += 1
        transfer.readers[register.from_incarnation] = reader
        transfer.num_readers = register.num_readers
        if transfer.request_id is None:
            self._rank.journal.tally.wait_begins(End.SOURCE, transfer.transfer_id, None, now_s)
        else:
            self._peer_opens(reader)
        self._rank.journal.emit(
            End.SOURCE, "destination_known", transfer.transfer_id, direction=register.direction.value, peer=peer.name
        )
        if len(transfer.readers) == register.num_readers:
            self._close_claim(transfer, Input.COMPLETE, now_s)

    def _say_no(self, caller: Caller, register: Register, outcome: Outcome, reason: str, now_s: float) -> None:
        """That is final: whoever hears it gives the blocks back, and the same registration may come a second time. Another
        attempt of that reader is another registration.

        Or it came a second time just now, and we are writing already: then that ends first, and says so itself.
        """
        transfer_id = TransferId(register.transfer_id)
        transfer = self._transfers.get(transfer_id)
        reader = None if transfer is None else transfer.readers.get(register.from_incarnation)
        if transfer is None or reader is None or reader.rendezvous.is_closed:
            self._said_no.add(_name_of(register), outcome, reason, now_s)
            self._serving.say_ended(caller, transfer_id, outcome, reason, register.number)
        elif _is_same(reader.register, register):
            self._serving.feed(transfer, reader, Input.FAIL, now_s, reason)
        else:
            self._serving.say_ended(caller, transfer_id, outcome, reason, register.number)

    def _refuse(self, caller: Caller, register: Register, error: BatonError, now_s: float) -> None:
        if num_refused := self._refused.add():
            reason = one_line(str(error), MAX_LOGGED_CHARACTERS)
            logger.warning("Transfer %s refused (one of %d lately): %s", register.transfer_id, num_refused, reason)
        self._rank.journal.tally.count(REFUSED, Why.of(error))
        self._say_no(caller, register, Outcome.FAILED, str(error), now_s)

    def _why_not(self, register: Register, now_s: float) -> tuple[Outcome, str] | None:
        if register.to_engine_id != self._rank.engine_id:
            return Outcome.FAILED, f"this is engine {self._rank.engine_id}, not {register.to_engine_id}"
        memory = self._said_no.recall(_name_of(register), now_s)
        if memory is not None:
            return memory.outcome, memory.reason
        transfer = self._transfers.get(TransferId(register.transfer_id))
        if transfer is not None:
            return _why_no_reader(transfer, register)
        memory = self._remembered.recall(TransferId(register.transfer_id), now_s)
        if memory is None:
            return None
        if memory.outcome is Outcome.DELIVERED:
            return Outcome.FAILED, "this transfer was delivered before; a new request needs a new transfer_id"
        return memory.outcome, memory.reason

    def _why_refused(self, register: Register) -> Why:
        if register.to_engine_id != self._rank.engine_id:
            return Why.WRONG_ENGINE
        transfer = self._transfers.get(TransferId(register.transfer_id))
        return Why.OVER if transfer is None or transfer.claim.is_closed else Why.TAKEN

    def _greet(self, register: Register, now_s: float) -> Peer | None:
        """The sender, introduced now or before; None when it has to introduce itself first. Raises BatonError."""
        hello = register.hello
        if hello is None:
            peer = self._rank.peers.find(register.from_incarnation)
            if peer is not None:
                peer.mapping(End.SOURCE)
            return peer
        if hello.incarnation != register.from_incarnation:
            raise RemoteProtocolError("the introduction does not belong to the registration's sender")
        try:
            peer = self._rank.peers.greet(hello, End.SOURCE, now_s)
            self._rank.transport.notify(peer.agent, encode(Greeting()))
        except BatonError:
            self._rank.journal.no_handshake()
            raise
        return peer

    def _renewed(self, caller: Caller, message: Renew, now_s: float) -> None:
        transfer_id = TransferId(message.transfer_id)
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            memory = self._remembered.recall(transfer_id, now_s)
            if memory is None:
                memory = Memory(Outcome.FAILED, "this transfer is not known here", now_s)
            self._serving.say_ended(caller, transfer_id, memory.outcome, memory.reason, message.registration)
            return
        reader = transfer.readers.get(message.from_incarnation)
        if reader is None:
            # Its registration was lost or dropped.
            self._serving.say(caller, HelloWanted(transfer_id))
            return
        if not _is_about(message, reader):
            self._serving.say_ended(caller, transfer_id, Outcome.FAILED, _TAKEN, message.registration)
            return
        if reader.rendezvous.is_closed:
            outcome = reader.rendezvous.outcome or Outcome.FAILED
            self._serving.say_ended(caller, transfer_id, outcome, reader.rendezvous.reason, message.registration)
            return
        self._serving.renewed(transfer, reader, caller, message, now_s)

    def _cancelled(self, caller: Caller, message: Cancel, now_s: float) -> None:
        transfer_id, reason = TransferId(message.transfer_id), message.reason or "cancelled by the decode side"
        transfer = self._transfers.get(transfer_id)
        reader = self._reader_meant(transfer, message)
        if transfer is not None and reader is not None and not reader.rendezvous.is_closed:
            reader.caller = caller
            self._serving.feed(transfer, reader, Input.CANCEL, now_s, reason, why=Why.PEER_GAVE_UP)
            if reader.rendezvous.state is State.DRAINING:
                self._serving.say(caller, Accepted(transfer_id))  # alive, and waiting for the transport
            return
        if not self._was_refused(message, now_s):
            self._not_wanted(transfer_id, now_s, reason)
        # Nothing of ours is going to touch the caller's blocks.
        self._serving.say_ended(caller, transfer_id, Outcome.CANCELLED, reason, message.registration)

    def _reader_meant(self, transfer: SourceTransfer | None, message: Cancel | Ended) -> Reader | None:
        reader = None if transfer is None else transfer.readers.get(message.from_incarnation)
        return reader if reader is not None and _is_about(message, reader) else None

    def _was_refused(self, message: Cancel | Ended, now_s: float) -> bool:
        """Then its sender ends what never began here: a sibling of that leg was refused as well, and took it along."""
        return self._said_no.recall(_name(message, message.registration), now_s) is not None

    def _released(self, message: Release, now_s: float) -> None:
        if message.to_engine_id == self._rank.engine_id:
            self._not_wanted(TransferId(message.transfer_id), now_s, message.reason)

    def _not_wanted(self, transfer_id: TransferId, now_s: float, reason: str) -> None:
        """Before anybody registered, or in its place. A registered reader ends its part by Cancel or Ended."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            if self._remembered.recall(transfer_id, now_s) is None:
                self._remembered.add(transfer_id, Outcome.CANCELLED, reason, now_s)
        elif not transfer.readers:
            self._close_claim(transfer, Input.CANCEL, now_s, reason, why=Why.PEER_GAVE_UP)

    def _ended(self, caller: Caller, message: Ended, now_s: float) -> None:
        transfer_id = TransferId(message.transfer_id)
        transfer = self._transfers.get(transfer_id)
        reader = self._reader_meant(transfer, message)
        if transfer is None or reader is None:
            if message.outcome is not Outcome.DELIVERED and not self._was_refused(message, now_s):
                # Given up before we knew of it, for instance while it was still to introduce itself.
                self._not_wanted(transfer_id, now_s, message.reason)
            return
        reader.caller = caller
        if reader.rendezvous.state is State.DRAINING:
            self._serving.feed(transfer, reader, Input.QUIET, now_s)
        elif message.outcome is Outcome.DELIVERED and reader.rendezvous.state is not State.POSTING:
            self._rank.carried(End.SOURCE, reader.peer, now_s)
            self._serving.feed(transfer, reader, Input.COMPLETE, now_s)
        else:
            why = Why.told(message.outcome)
            self._serving.feed(transfer, reader, Input.FAIL, now_s, message.reason, why=why, told=message.outcome)

    def _connected(self, caller: Caller, now_s: float) -> None:
        for transfer in self._transfers.values():
            for reader in transfer.readers.values():
                if reader.caller == caller:
                    self._rank.carried(End.SOURCE, reader.peer, now_s)

    def _maybe_release(self, transfer: SourceTransfer) -> None:
        """Whoever wants the blocks back gets them once nothing of ours or of a reader's touches them."""
        is_touched = transfer.num_in_flight or any(
            reader.rendezvous.state in {State.DRAINING, State.OFFERED} for reader in transfer.readers.values()
        )
        if transfer.awaits_release is not None and not is_touched:
            transfer.awaits_release.set()
            transfer.awaits_release = None

    # -- time, and the machines' effects -----------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        for transfer in list(self._transfers.values()):
            if transfer.claim.is_overdue(now_s):
                if transfer.is_computing:
                    transfer.claim.moved(now_s)
                else:
                    self._close_claim(transfer, Input.EXPIRE, now_s, _why_unclaimed(transfer), why=Why.NOBODY_CAME)
            for reader in transfer.open_readers():
                self._serving.tick(transfer, reader, now_s)
        for key, waited_s in self._rank.journal.tally.long_waits(End.SOURCE, now_s):
            wait = self._transfers[TransferId(key)].wait(waited_s, now_s)
            self._rank.journal.waiting(prefill_sentence(wait), waited_s)

    def fell_behind(self, now_s: float) -> None:
        """More comes in than is read in a turn: what is read now may have been said a while ago."""
        self._serving.doubt(now_s)

    def stalled(self, now_s: float) -> None:
        """Our own loop stood still for a while."""
        self._serving.stalled(self._open_readers(), now_s)

    def settled(self, settled: Settled, now_s: float) -> None:
        """The transport is done with a segment of ours."""
        transfer = self._transfers.get(settled.move.transfer_id)
        reader = None if transfer is None else transfer.readers.get(settled.move.peer.incarnation)
        if transfer is not None and reader is not None and reader.move is settled.move:
            self._maybe_release(transfer)
            self._serving.settled(transfer, reader, settled, now_s)

    def _close_claim(
        self, transfer: SourceTransfer, what: Input, now_s: float, reason: str = "", *, why: Why | None = None
    ) -> None:
        """No further reader will be waited for. Nobody is there to be told."""
        if Effect.REPORT in self._rank.journal.feed(transfer, what, now_s, reason, why=why):
            self._closed(transfer, transfer.claim, now_s)

    def _reader_closed(self, transfer: SourceTransfer, reader: Reader, now_s: float) -> None:
        if transfer.request_id is not None:
            self._rank.journal.tally.peer_closes(End.SOURCE, reader.peer_name)
        self._closed(transfer, reader.rendezvous, now_s)

    def _closed(self, transfer: SourceTransfer, part: Rendezvous, now_s: float) -> None:
        """A reader, or the claim, came to its end; with the last of them the transfer does."""
        if part.outcome is not Outcome.DELIVERED and transfer.failure is None:
            transfer.failure = part.outcome or Outcome.FAILED, part.reason
        self._maybe_release(transfer)
        if not transfer.is_over:
            return
        outcome, reason = transfer.failure or (Outcome.DELIVERED, part.reason)
        del self._transfers[transfer.transfer_id]
        self._remembered.add(transfer.transfer_id, outcome, reason, now_s)
        self._rank.journal.tally.wait_ends(End.SOURCE, transfer.transfer_id)
        self._rank.journal.ended(
            End.SOURCE,
            transfer.transfer_id,
            outcome,
            direction=transfer.direction,
            reason=reason,
            is_held=transfer.is_held,
        )
        if transfer.is_held and transfer.request_id is not None:
            self._rank.results.sent(transfer.request_id)

    # -- what the loop needs to know ---------------------------------------------------------------------------------

    @property
    def has_offered(self) -> bool:
        return any(reader.offered_s is not None for reader in self._open_readers())

    def is_being_read(self, now_s: float) -> bool:
        return any(
            reader.offered_s is not None and now_s < reader.offered_s + READ_WATCH_S for reader in self._open_readers()
        )

    def _open_readers(self) -> list[Reader]:
        return [reader for transfer in self._transfers.values() for reader in transfer.open_readers()]

    def __len__(self) -> int:
        return len(self._transfers)


def _why_no_reader(transfer: SourceTransfer, register: Register) -> tuple[Outcome, str] | None:
    """Why this decode rank cannot take a transfer that is going on."""
    known = transfer.readers.get(register.from_incarnation)
    if known is not None:
        if not _is_same(known.register, register):
            return Outcome.FAILED, _TAKEN
        if known.rendezvous.is_closed:
            return known.rendezvous.outcome or Outcome.FAILED, known.rendezvous.reason
        return None
    if transfer.num_readers is not None and register.num_readers != transfer.num_readers:
        return Outcome.FAILED, (
            f"this decode rank says that {register.num_readers} ranks take the transfer from here, another one said "
            f"{transfer.num_readers}"
        )
    if transfer.num_readers is not None and len(transfer.readers) >= transfer.num_readers:
        return Outcome.FAILED, _TAKEN
    if transfer.claim.is_closed:
        return transfer.failure or (Outcome.FAILED, "this transfer has ended")
    return None


def _why_unclaimed(transfer: SourceTransfer) -> str:
    if transfer.request_id is None:
        return "no prefill request of this transfer arrived in time"
    if not transfer.readers:
        return "no decode side registered before the lease ended"
    return f"{len(transfer.readers)} of {transfer.num_readers} decode ranks registered before the lease ended"


def _name_of(register: Register) -> TransferId:
    return _name(register, register.number)


def _name(message: Register | Cancel | Ended, number: int) -> TransferId:
    """One attempt of one reader."""
    return TransferId(f"{message.transfer_id} {message.from_incarnation} {number}")


def _is_about(message: Renew | Cancel | Ended, reader: Reader) -> bool:
    """Not about another attempt of the same decode rank."""
    return message.registration in {0, reader.register.number}


def _is_same(known: Register, again: Register) -> bool:
    """The same registration, said twice; only the first need carry the introduction."""
    return msgspec.structs.replace(known, hello=None) == msgspec.structs.replace(again, hello=None)

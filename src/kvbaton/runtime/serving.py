"""Serves one decode rank of a transfer: writes our blocks to it, or offers them to be read, and sees it through to its end.

Invariant: a reader's blocks are written only while it is certain that they are still its own (docs/decisions/002), and a
reader is closed only when no handle of ours is in flight for it. Next: mover.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from kvbaton.errors import BatonError, PeerLost
from kvbaton.protocol.messages import Accepted, Cancel, Confirm, Ended, Offer, Renew, SegmentPosted, SideMessage, encode
from kvbaton.protocol.rendezvous import Effect, Input, State
from kvbaton.runtime.events import SourceAdvanced
from kvbaton.runtime.metrics import Why
from kvbaton.runtime.mover import Move, Settled
from kvbaton.runtime.rank import Rank
from kvbaton.runtime.sidechannel import Caller
from kvbaton.runtime.source_transfer import NEVER_S, Reader, SourceTransfer
from kvbaton.transport.base import Operation
from kvbaton.types import Direction, End, Outcome, TransferId

logger = logging.getLogger("vllm.kvbaton")

DOUBT_S = 1.0
"""How long after a stall of ours words may still come out of queues in which they lay for any time."""


class Serving:
    def __init__(self, rank: Rank, closed: Callable[[SourceTransfer, Reader, float], None]) -> None:
        """`closed` is told of every reader that came to its end."""
        self._rank = rank
        self._closed = closed
        self._num_questions = 0
        self._in_doubt_until_s = NEVER_S

    def match(self, transfer: SourceTransfer, reader: Reader, now_s: float) -> None:
        """Starts or continues the move as far as both ends are known."""
        frontier, register = transfer.frontier, reader.register
        if frontier is None or reader.rendezvous.state not in {State.OPEN, State.POSTING}:
            return
        if frontier.is_last and frontier.num_tokens != register.num_tokens:
            reason = f"the prompt has {frontier.num_tokens} tokens here and {register.num_tokens} at the decode side"
            self.feed(transfer, reader, Input.FAIL, now_s, reason, why=Why.MISMATCH)
            return
        if register.direction is Direction.PULL:
            # Only what the engine holds for us alone: a preemption would overwrite what a reader believes to be leased.
            if frontier.is_last and transfer.is_engine_done and transfer.is_held:
                self._offer(transfer, reader, frontier, now_s)
            return
        if reader.move is None:
            reader.move = self._new_move(transfer, reader)
            self.feed(transfer, reader, Input.POSTS, now_s)
        if frontier.generation > reader.move.segments.generation and reader.num_in_flight:
            return  # a preempted prefill starts over; what it sent before lands first (`settled` comes back here)
        reader.move.our_blocks = frontier.blocks
        reader.move.segments.advance(frontier.num_tokens, is_final=frontier.is_last, generation=frontier.generation)
        if frontier.is_last and reader.move.num_bytes_hidden is None:
            reader.move.num_bytes_hidden = reader.move.num_bytes_moved
        self._pump(transfer, reader, reader.move, now_s)

    def _new_move(self, transfer: SourceTransfer, reader: Reader) -> Move:
        register = reader.register
        return self._rank.new_move(
            Operation.WRITE,
            transfer.transfer_id,
            reader.rendezvous,
            reader.peer,
            their_blocks=register.blocks,
            first_token=register.first_token,
            num_tokens=register.num_tokens,
            registration=register.number,
        )

    def _pump(self, transfer: SourceTransfer, reader: Reader, move: Move, now_s: float) -> None:
        if not self._may_write(reader, now_s):
            return
        try:
            num_posted = self._rank.mover.pump(move)
        except BatonError as error:
            self.feed(transfer, reader, Input.FAIL, now_s, str(error), why=Why.of(error))
            return
        if num_posted:
            reader.rendezvous.moved(now_s)
            self.say(reader.caller, SegmentPosted(transfer.transfer_id))
        self._maybe_complete(transfer, reader, now_s)

    def _may_write(self, reader: Reader, now_s: float) -> bool:
        """The reader's blocks are certainly still its own; else it is asked, and its answer comes back to `match`."""
        if now_s - reader.heard_s < reader.register.grace_s / 2:
            return True
        self.ask(reader, now_s)
        return False

    def ask(self, reader: Reader, now_s: float) -> None:
        """Whether its blocks are still its own; again, if need be: words get lost."""
        if reader.question is None:
            self._num_questions += 1
            reader.question, reader.asked_s = self._num_questions, now_s
        self.say(reader.caller, Confirm(reader.transfer_id, reader.question))

    def doubt(self, now_s: float) -> None:
        """What is read from now on, for a while, may have been said long ago: only answers to questions count."""
        self._in_doubt_until_s = now_s + DOUBT_S

    def stalled(self, readers: Iterable[Reader], now_s: float) -> None:
        """Our own loop stood still: what lies unread in our queues may have been said at any time before."""
        self.doubt(now_s)
        for reader in readers:
            reader.heard_s = NEVER_S

    def heard(self, reader: Reader, caller: Caller, now_s: float, *, answers: int = 0) -> None:
        """A word of the reader's: how old may it be? An answer is younger than our question, and no more is known of it:
        we may have stood still since we asked.
        """
        reader.caller = caller
        if answers and answers == reader.question:
            reader.question = None
            reader.heard_s = reader.asked_s
        elif reader.question is None and now_s >= self._in_doubt_until_s:
            reader.heard_s = now_s

    def _maybe_complete(self, transfer: SourceTransfer, reader: Reader, now_s: float) -> None:
        is_posting = reader.rendezvous.state is State.POSTING
        if is_posting and reader.move is not None and reader.move.segments.is_complete:
            self._rank.mover.completed(reader.move)
            self.feed(transfer, reader, Input.COMPLETE, now_s)

    def _offer(self, transfer: SourceTransfer, reader: Reader, frontier: SourceAdvanced, now_s: float) -> None:
        self.feed(transfer, reader, Input.OFFERS, now_s)
        reader.offered_s = now_s
        reader.offer = Offer(
            transfer.transfer_id,
            num_tokens=frontier.num_tokens,
            blocks=frontier.blocks,
            lease_s=self._rank.deadlines.offered_s,
            hello=self._rank.hello,
        )
        self.say(reader.caller, reader.offer)

    def renewed(self, transfer: SourceTransfer, reader: Reader, caller: Caller, message: Renew, now_s: float) -> None:
        """The reader still waits, maybe for an offer that was lost on its way."""
        self.heard(reader, caller, now_s, answers=message.answers)
        if transfer.request_id is not None:
            reader.rendezvous.heard(now_s)
        if reader.rendezvous.state is State.DRAINING and reader.offer is not None:
            # Its lease is not renewed any more; the word that said so may have been lost.
            self._say_cancel(reader)
            return
        self.say(caller, Accepted(transfer.transfer_id))
        if message.lacks_offer and reader.offer is not None and reader.rendezvous.state is State.OFFERED:
            self.say(caller, reader.offer)
        self.match(transfer, reader, now_s)

    def settled(self, transfer: SourceTransfer, reader: Reader, settled: Settled, now_s: float) -> None:
        """The transport is done with a segment of ours."""
        if settled.failure is not None:
            self.feed(transfer, reader, Input.FAIL, now_s, settled.failure, why=Why.NOT_MOVED)
        else:
            self._rank.carried(End.SOURCE, settled.move.peer, now_s)
            reader.rendezvous.moved(now_s)
            # Before looking further: what is complete is delivered, whatever a preempted prefill computes again.
            self._maybe_complete(transfer, reader, now_s)
            self.match(transfer, reader, now_s)
        if reader.rendezvous.state is State.DRAINING and reader.num_in_flight == 0:
            self.feed(transfer, reader, Input.QUIET, now_s)

    def tick(self, transfer: SourceTransfer, reader: Reader, now_s: float) -> None:
        rendezvous = reader.rendezvous
        if not rendezvous.is_overdue(now_s):
            return
        is_waiting = rendezvous.state in {State.OPEN, State.POSTING} and reader.num_in_flight == 0
        if is_waiting and transfer.is_computing:
            # The engine owns the request's life while it queues and computes, also between two chunks.
            rendezvous.moved(now_s)
            return
        reason, why = f"no progress while {rendezvous.state.value}", Why.SILENCE
        if transfer.request_id is None:
            reason, why = "no prefill request of this transfer arrived in time", Why.NOBODY_CAME
        elif reader.question is not None:
            reason = "the decode side did not say whether it still wants the transfer"
        self.feed(transfer, reader, Input.EXPIRE, now_s, reason, why=why)

    def feed(
        self,
        transfer: SourceTransfer,
        reader: Reader,
        what: Input,
        now_s: float,
        reason: str = "",
        *,
        why: Why | None = None,
        told: Outcome | None = None,
    ) -> None:
        rendezvous = reader.rendezvous
        if rendezvous.state is State.DRAINING and reader.move is not None and reader.num_in_flight:
            # Neither a clock nor a peer's word stops an operation of ours: it is over when its handle is (`settled`).
            if what is Input.EXPIRE:
                self._rank.give_up(reader.move, now_s)
            return
        for effect in self._rank.journal.feed(reader, what, now_s, reason, why=why, told=told):
            match effect:
                case Effect.STOP_POSTING:
                    self._stop(transfer, reader, now_s)
                case Effect.TELL_CANCEL:
                    self._say_cancel(reader)
                case Effect.TELL_ENDED if rendezvous.outcome is not Outcome.DELIVERED:
                    outcome = rendezvous.outcome or Outcome.FAILED
                    number = reader.register.number
                    self.say_ended(reader.caller, transfer.transfer_id, outcome, rendezvous.reason, number)
                case Effect.FORGET_PEER | Effect.FENCE_PEER:
                    # A reader that wakes up late reads what it must not use: it counts the lease for itself.
                    self._rank.peers.forget(reader.peer)
                case Effect.REPORT:
                    reader.peer.leave(now_s)
                    self._closed(transfer, reader, now_s)

    def _stop(self, transfer: SourceTransfer, reader: Reader, now_s: float) -> None:
        if reader.move is not None:
            reader.move.is_stopped = True
        if reader.num_in_flight == 0:
            self.feed(transfer, reader, Input.QUIET, now_s)

    def _say_cancel(self, reader: Reader) -> None:
        reason, number = reader.rendezvous.reason, reader.register.number
        self.say(reader.caller, Cancel(reader.transfer_id, self._rank.incarnation, reason, number))

    def say_ended(
        self, caller: Caller, transfer_id: TransferId, outcome: Outcome, reason: str, registration: int
    ) -> None:
        self.say(caller, Ended(transfer_id, self._rank.incarnation, outcome, reason, registration))

    def say(self, caller: Caller, message: SideMessage) -> bool:
        """False when nobody is there to hear it."""
        try:
            self._rank.channel.send(caller, encode(message))
        except PeerLost as error:
            # Its transfers end by their own deadlines, or by the transport failing to reach it.
            logger.debug("A decode side left before it got %s: %s", type(message).__name__, error)
            return False
        return True

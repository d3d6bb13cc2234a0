"""One transfer at the prefill end: what the engine said of the request, and one reader per decode rank that gets its KV.

Invariant: every reader has a rendezvous of its own; `claim` is the one of the readers that have not registered yet. The
transfer is over when all of them are closed. Next: source.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvbaton.protocol.messages import Offer, Register
from kvbaton.protocol.rendezvous import Rendezvous
from kvbaton.runtime.events import SourceAdvanced
from kvbaton.runtime.mover import Move
from kvbaton.runtime.peers import Peer
from kvbaton.runtime.sidechannel import Caller
from kvbaton.runtime.waiting import BlocksWait, ReaderWait
from kvbaton.types import Direction, End, Outcome, RequestId, TransferId

NEVER_S = float("-inf")


@dataclass
class Reader:
    """A decode rank and where it wants the KV, as registered."""

    register: Register
    peer: Peer
    caller: Caller
    rendezvous: Rendezvous
    heard_s: float
    """Its last word that is known to be fresh; minus infinity when none is."""
    question: int | None = None
    """The number of our Confirm that it has not answered yet."""
    asked_s: float = NEVER_S
    """When we asked it first."""
    move: Move | None = None
    offered_s: float | None = None
    offer: Offer | None = None

    @property
    def end(self) -> End:
        return End.SOURCE

    @property
    def transfer_id(self) -> TransferId:
        return TransferId(self.register.transfer_id)

    @property
    def peer_name(self) -> str:
        return self.peer.name

    @property
    def num_in_flight(self) -> int:
        return 0 if self.move is None else self.move.num_in_flight

    def wait(self, now_s: float) -> ReaderWait:
        return ReaderWait(
            peer_name=self.peer_name,
            direction=self.register.direction,
            state=self.rendezvous.state,
            num_posted=0 if self.move is None else self.move.segments.num_posted,
            num_in_flight=self.num_in_flight,
            is_asked=self.question is not None,
            heard_ago_s=None if self.heard_s == NEVER_S else now_s - self.heard_s,
        )


@dataclass
class SourceTransfer:
    transfer_id: TransferId
    claim: Rendezvous
    opened_s: float
    request_id: RequestId | None = None
    frontier: SourceAdvanced | None = None
    num_readers: int | None = None
    """How many decode ranks take it from us, once one has said so."""
    readers: dict[str, Reader] = field(default_factory=dict)
    """By incarnation."""
    is_engine_done: bool = False
    """The engine has finished the request; what it holds now, it holds for us."""
    is_held: bool = False
    failure: tuple[Outcome, str] | None = None
    """How the first that did not deliver ended."""
    awaits_release: threading.Event | None = None
    """Somebody wants the blocks back and waits for our handles."""

    @property
    def end(self) -> End:
        return End.SOURCE

    @property
    def peer_name(self) -> str:
        """Of the readers that have not registered yet."""
        return "unregistered"

    @property
    def rendezvous(self) -> Rendezvous:
        """That the transfer has as a whole, before and beside its readers'."""
        return self.claim

    @property
    def direction(self) -> Direction | None:
        """Known once somebody has registered."""
        return next((reader.register.direction for reader in self.readers.values()), None)

    @property
    def is_computing(self) -> bool:
        return self.request_id is not None and not self.is_engine_done

    @property
    def num_in_flight(self) -> int:
        return sum(reader.num_in_flight for reader in self.readers.values())

    @property
    def is_over(self) -> bool:
        return self.claim.is_closed and all(reader.rendezvous.is_closed for reader in self.readers.values())

    @property
    def num_blocks(self) -> int:
        """That hold KV which is final."""
        return 0 if self.frontier is None else sum(len(group) for group in self.frontier.blocks)

    def wait(self, waited_s: float, now_s: float) -> BlocksWait:
        """What the transfer waits for, as facts."""
        return BlocksWait(
            transfer_id=self.transfer_id,
            waited_s=waited_s,
            request_id=self.request_id,
            num_blocks=self.num_blocks,
            num_registered=len(self.readers),
            num_readers=self.num_readers,
            slowest=next((reader.wait(now_s) for reader in self.open_readers()), None),
        )

    def open_readers(self) -> Iterator[Reader]:
        """Those that are not closed, also while some of them close."""
        return (reader for reader in list(self.readers.values()) if not reader.rendezvous.is_closed)

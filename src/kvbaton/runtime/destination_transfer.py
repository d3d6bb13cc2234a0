"""One request's KV at the decode end: a reception, and one leg per prefill rank that feeds it.

Invariant: every leg has a rendezvous of its own; the reception is over when all of them are closed, and it was delivered
when every one of them was. Next: destination.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvbaton.protocol.receipt import Receipt
from kvbaton.protocol.rendezvous import Rendezvous
from kvbaton.runtime.events import DestinationOpened
from kvbaton.runtime.lines import Line
from kvbaton.runtime.mover import Move
from kvbaton.runtime.sidechannel import Endpoint
from kvbaton.runtime.waiting import KVWait
from kvbaton.types import Direction, End, Outcome, TransferId


@dataclass
class Reception:
    opened: DestinationOpened
    opened_s: float
    legs: list[Leg] = field(default_factory=list)
    failure: tuple[Outcome, str] | None = None
    """How the first leg that did not deliver ended."""

    @property
    def transfer_id(self) -> TransferId:
        return self.opened.ticket.transfer_id

    @property
    def direction(self) -> Direction:
        return self.opened.ticket.direction

    @property
    def is_over(self) -> bool:
        return all(leg.rendezvous.is_closed for leg in self.legs)

    @property
    def num_bytes(self) -> int:
        """That we moved ourselves."""
        return sum(0 if leg.move is None else leg.move.num_bytes for leg in self.legs)

    @property
    def num_blocks(self) -> int:
        return sum(len(group) for group in self.opened.blocks)

    def open_legs(self) -> Iterator[Leg]:
        """Those that are not closed, also while some of them close."""
        return (leg for leg in list(self.legs) if not leg.rendezvous.is_closed)


@dataclass
class Leg:
    reception: Reception
    rank: int
    """Of the prefill engine."""
    number: int
    """Of our registration."""
    endpoint: Endpoint
    num_readers: int
    """How many decode ranks take this transfer from that prefill rank."""
    incarnation: str
    """Ours, under which the leg was registered."""
    rendezvous: Rendezvous
    renew_at_s: float
    unanswered_at_s: float
    """By then somebody must have answered at the endpoint."""
    receipt: Receipt = field(default_factory=Receipt)
    move: Move | None = None
    lease_s: float | None = None
    """For how long the offered blocks are held from each of our signs of life on."""
    lease_until_s: float = float("inf")
    is_expecting: bool = False
    """A segment is known to be on its way."""
    is_accepted: bool = False
    is_ended_by_peer: bool = False

    @property
    def end(self) -> End:
        return End.DESTINATION

    @property
    def peer_name(self) -> str:
        return f"{self.reception.opened.ticket.engine_id}/{self.rank}"

    @property
    def transfer_id(self) -> TransferId:
        return self.reception.transfer_id

    @property
    def direction(self) -> Direction:
        return self.reception.direction

    @property
    def num_in_flight(self) -> int:
        return 0 if self.move is None else self.move.num_in_flight

    def wait(self, waited_s: float, line: Line | None, now_s: float) -> KVWait:
        """What the leg waits for, as facts."""
        return KVWait(
            transfer_id=self.transfer_id,
            waited_s=waited_s,
            direction=self.direction,
            peer_name=self.peer_name,
            address=self.endpoint.address.removeprefix("tcp://"),
            state=self.rendezvous.state,
            is_accepted=self.is_accepted,
            num_arrived=self.receipt.num_segments,
            num_in_flight=self.num_in_flight,
            has_line=line is not None,
            heard_ago_s=None if line is None or line.heard_s is None else now_s - line.heard_s,
            num_other_ranks=sum(1 for _ in self.reception.open_legs()) - 1,
            ended_because=self.rendezvous.reason,
        )

"""What lives as long as this worker process: who we are, our memory, the transport and the sockets.

Both ends of transfers (source.py, destination.py) work on it; only the driver's thread touches it.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvbaton.geometry.descriptors import alignment_tokens
from kvbaton.geometry.layout import bytes_per_token
from kvbaton.protocol.messages import Hello
from kvbaton.protocol.rendezvous import Deadlines, Rendezvous
from kvbaton.protocol.segments import Segments
from kvbaton.runtime.events import BlockLists, Results
from kvbaton.runtime.journal import Journal
from kvbaton.runtime.metrics import FENCES, Fenced
from kvbaton.runtime.mover import Move, Mover
from kvbaton.runtime.peers import Peer, Peers, agent_name
from kvbaton.runtime.sidechannel import SideChannel
from kvbaton.transport.base import Operation, Transport
from kvbaton.types import End, TransferId

logger = logging.getLogger("vllm.kvbaton")

MAX_SEGMENT_BYTES = 64 << 20
"""So that what is moved in one piece shows progress well within the shortest deadline, also on a slow network."""


@dataclass
class Rank:
    hello: Hello
    open_transport: Callable[[str], Transport]
    """A transport of this agent name, with our memory registered."""
    transport: Transport
    channel: SideChannel
    peers: Peers
    mover: Mover
    results: Results
    journal: Journal
    deadlines: Deadlines
    clock: Callable[[], float]

    @property
    def engine_id(self) -> str:
        return self.hello.engine_id

    @property
    def incarnation(self) -> str:
        return self.hello.incarnation

    def carried(self, end: End, peer: Peer, now_s: float) -> None:
        """Something came over the link to or from `peer`, to which we are that end."""
        peer.carried(now_s)
        self.journal.tally.peer_connects(end, peer.name)

    def give_up(self, move: Move, now_s: float) -> None:
        """The move's deadline is over and the transport still works on it: it is asked to let go, in the end it is cut off."""
        if self.mover.abandon(move):
            move.abandoned_s = now_s
            self.peers.forget(move.peer)
        elif move.abandoned_s is not None and now_s >= move.abandoned_s + self.deadlines.draining_s:
            logger.warning(
                "The transport has not let go of a %s of transfer %s for %.0f s. It is closed and opened anew; everything "
                "in flight here fails.",
                move.operation.value, move.transfer_id, self.deadlines.draining_s,
            )  # fmt: skip
            self.fence(Fenced.STUCK_OPERATION)

    def fence(self, why: Fenced) -> None:
        """Nothing that any peer has begun can reach our memory any more; we go on under a new incarnation.

        The transport is closed and opened anew, which breaks every link: all that is in flight, also with healthy peers,
        fails. The last resort against a writer that is silent but may wake up. Raises TransportError, Unsupported.
        """
        incarnation = uuid.uuid4().hex
        self.transport.close()
        self.transport = self.open_transport(agent_name(self.engine_id, self.hello.rank, incarnation))
        self.hello = msgspec.structs.replace(
            self.hello, incarnation=incarnation, agent_metadata=self.transport.local_metadata()
        )
        self.mover.replace_transport(self.transport)
        self.peers.replace_transport(self.transport)
        self.journal.tally.count(FENCES, why)

    def new_move(
        self,
        operation: Operation,
        transfer_id: TransferId,
        rendezvous: Rendezvous,
        peer: Peer,
        *,
        their_blocks: BlockLists,
        first_token: int,
        num_tokens: int,
        registration: int = 0,
    ) -> Move:
        """What is to be moved between this rank and `peer`, none of it yet. Our blocks are filled in by the caller."""
        layout = self.hello.layout
        return Move(
            transfer_id=transfer_id,
            rendezvous=rendezvous,
            operation=operation,
            peer=peer,
            segments=Segments(
                first_token,
                alignment_tokens(layout.block_size_tokens, peer.hello.layout.block_size_tokens),
                max_tokens=MAX_SEGMENT_BYTES // bytes_per_token(layout),
            ),
            their_blocks=their_blocks,
            num_tokens=num_tokens,
            registration=registration,
        )

"""What lives as long as this worker process: who we are, our memory, the transport and the sockets.

Both ends of transfers (source.py, destination.py) work on it; only the driver's thread touches it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvbaton.geometry.descriptors import alignment_tokens
from kvbaton.geometry.layout import bytes_per_token
from kvbaton.protocol.messages import Hello
from kvbaton.protocol.rendezvous import Deadlines, Rendezvous
from kvbaton.protocol.segments import Segments
from kvbaton.runtime.events import BlockLists, Results
from kvbaton.runtime.mover import Move, Mover
from kvbaton.runtime.peers import Peer, Peers
from kvbaton.runtime.sidechannel import SideChannel
from kvbaton.runtime.trace import Trace
from kvbaton.transport.base import Operation, Transport
from kvbaton.types import TransferId

MAX_SEGMENT_BYTES = 256 << 20
"""So that what is moved in one piece shows progress well within the shortest deadline, also on a slow network."""


@dataclass(frozen=True)
class Rank:
    hello: Hello
    transport: Transport
    channel: SideChannel
    peers: Peers
    mover: Mover
    results: Results
    source_trace: Trace
    destination_trace: Trace
    deadlines: Deadlines
    clock: Callable[[], float]

    @property
    def engine_id(self) -> str:
        return self.hello.engine_id

    @property
    def incarnation(self) -> str:
        return self.hello.incarnation

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
        )

"""What lives as long as this worker process: who we are, our memory, the transport and the sockets.

Both ends of transfers (source.py, destination.py) work on it; only the driver's thread touches it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvbaton.protocol.messages import Hello
from kvbaton.protocol.rendezvous import Deadlines
from kvbaton.runtime.events import Results
from kvbaton.runtime.mover import Mover
from kvbaton.runtime.peers import Peers
from kvbaton.runtime.sidechannel import SideChannel
from kvbaton.runtime.trace import Trace
from kvbaton.transport.base import Transport


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
    def alignment_tokens(self) -> int:
        """A multiple of every cache group's block size: where a prompt may be cut without cutting a block."""
        return math.lcm(*self.hello.layout.block_size_tokens)

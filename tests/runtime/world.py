"""Engines joined by a scripted fabric, with block pools full of canaries, in virtual time.

Each `Engine` is a real `Driver` over the loopback transport; the test decides when it takes a turn and what time it is.
`World.check` states what must hold after every story: nobody has a transfer or a handle left, every request was reported
exactly once, and no block changed but those that were to be received.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.geometry.layout import KVLayout, Region, plain
from kvbaton.protocol.messages import PROTOCOL_VERSION, Hello
from kvbaton.protocol.params import DecodeTicket
from kvbaton.protocol.rendezvous import Deadlines
from kvbaton.runtime.driver import Driver
from kvbaton.runtime.events import (
    BlockLists,
    DestinationCancelled,
    DestinationOpened,
    NothingNeeded,
    Results,
    SourceAdvanced,
    SourceFinished,
    SourceOpened,
)
from kvbaton.runtime.journal import Journal
from kvbaton.runtime.mover import Mover
from kvbaton.runtime.peers import Peers, agent_name
from kvbaton.runtime.rank import Rank
from kvbaton.runtime.sidechannel import SideChannel
from kvbaton.transport.base import Span, Transport
from kvbaton.transport.loopback import Fabric, LoopbackTransport
from kvbaton.types import Direction, EngineId, RequestId, TransferId
from tests.runtime.memory_channel import HOST, MemoryChannel, Network

BLOCK_SIZE = 4
NUM_BLOCKS = 24
BLOCK_BYTES = 48
LAYERS = ("layer.0", "layer.1")
MAX_ROUNDS = 300

TID = TransferId("t")


@dataclass
class World:
    fabric: Fabric = field(default_factory=Fabric)
    network: Network = field(default_factory=Network)
    now_s: float = 1000.0
    engines: list[Engine] = field(default_factory=list)
    deadlines: Deadlines = field(default_factory=Deadlines)
    make_channel: Callable[[Network, int], SideChannel] = MemoryChannel
    make_transport: Callable[[str, Fabric], Transport] = LoopbackTransport

    def engine(self, name: str, **changed: Any) -> Engine:
        """A started engine; keyword arguments change its layout, or are `port`, `incarnation` and `rank`."""
        made = Engine(self, name, **changed)
        self.engines.append(made)
        return made

    def pair(self) -> tuple[Engine, Engine]:
        return self.engine("P"), self.engine("D")

    def run(self, *engines: Engine) -> None:
        """Turns of these engines (all that live, unless named) until nothing more happens by itself."""
        chosen = engines or tuple(each for each in self.engines if each.is_alive)
        for _ in range(MAX_ROUNDS):
            num_before = self.network.num_sent
            for each in chosen:
                each.turn()
            if self.network.num_sent == num_before and not any(each.is_busy for each in chosen):
                return
        raise AssertionError("the world does not come to rest")

    def pass_time(self, seconds: float, *engines: Engine, step_s: float = 1.0) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + step_s)
            self.run(*engines)

    def check(self) -> None:
        for each in self.engines:
            each.check()


class Engine:
    def __init__(
        self, world: World, name: str, *, port: int = 0, incarnation: str = "", rank: int = 0, **changed: object
    ) -> None:
        self.world, self.name, self.is_alive = world, name, True
        incarnation = incarnation or f"{name}{rank} first"
        seed = sum(name.encode()) + sum(incarnation.encode())
        shape = (len(LAYERS), NUM_BLOCKS, BLOCK_BYTES)
        self.pool = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
        self.before = self.pool.copy()
        self.may_change: set[int] = set()
        self.sent: Counter[RequestId] = Counter()
        self.received: Counter[RequestId] = Counter()
        self.failures: dict[RequestId, str] = {}
        self.num_reports = 0
        self.expected: Counter[RequestId] = Counter()
        moves_bytes = self._open_transport(agent_name(name, rank, incarnation))
        self.channel = world.make_channel(world.network, port)
        self.results = Results()
        layout = msgspec.structs.replace(self._layout(), **changed)
        hello = Hello(PROTOCOL_VERSION, name, rank, incarnation, moves_bytes.local_metadata(), layout)
        journal = Journal()
        self.rank = Rank(
            hello=hello,
            open_transport=self._open_transport,
            transport=moves_bytes,
            channel=self.channel,
            peers=Peers(moves_bytes, layout),
            mover=Mover(moves_bytes, journal),
            results=self.results,
            journal=journal,
            deadlines=world.deadlines,
            clock=lambda: world.now_s,
        )
        self.driver = Driver(self.rank)

    def use_layout(self, layout: KVLayout) -> None:
        """Before anything else happens."""
        self.rank.hello = msgspec.structs.replace(self.rank.hello, layout=layout)
        self.rank.peers = Peers(self.rank.transport, layout)

    def _open_transport(self, name: str) -> Transport:
        opened = self.world.make_transport(name, self.world.fabric)
        opened.register([Span(self.pool.ctypes.data, self.pool.nbytes, 0)], "DRAM")
        return opened

    def _layout(self) -> KVLayout:
        layer_bytes = NUM_BLOCKS * BLOCK_BYTES
        base = self.pool.ctypes.data
        token_bytes = BLOCK_BYTES // BLOCK_SIZE
        regions = [
            Region(
                layer=layer,
                cache_group=0,
                base_address=base + index * layer_bytes,
                num_rows=NUM_BLOCKS,
                row_stride_bytes=BLOCK_BYTES,
                row_tokens=BLOCK_SIZE,
                num_heads=1,
                total_heads=1,
                head_stride_bytes=BLOCK_BYTES,
                parts=plain(token_bytes, token_bytes),
            )
            for index, layer in enumerate(LAYERS)
        ]
        return KVLayout(
            regions=tuple(regions),
            block_size_tokens=(BLOCK_SIZE,),
            window_tokens=(0,),
            memory_kind="DRAM",
            device_id=0,
            model="tiny",
            dtype="uint8",
            num_kv_heads=1,
            head_dim=12,
            axis_order="LBNHC",
            packing="",
            tp_size=1,
            tp_rank=0,
            pp_size=1,
            pp_rank=0,
        )

    # -- what the engine's thread would do ---------------------------------------------------------------------------

    @property
    def transport(self) -> LoopbackTransport:
        assert isinstance(self.rank.transport, LoopbackTransport)
        return self.rank.transport

    def turn(self) -> None:
        self.driver.turn()
        self.collect()

    def collect(self) -> None:
        batch = self.results.take()
        if not (batch.sent or batch.received):
            return
        self.num_reports += 1
        self.sent.update(batch.sent)
        self.received.update(batch.received)
        assert not batch.failed.keys() - batch.received
        self.failures.update(batch.failed)

    def crash(self) -> None:
        """The process is gone: memory stays, sockets and links do not."""
        self.is_alive = False
        self.driver.close()

    def open_source(self, tid: TransferId = TID, rid: str = "p") -> None:
        self.driver.submit([SourceOpened(tid, RequestId(rid))])

    def advance(
        self,
        num_tokens: int,
        blocks: list[int],
        *,
        last: bool = True,
        generation: int = 0,
        tid: TransferId = TID,
        rid: str = "p",
    ) -> None:
        lists = (tuple(blocks),)
        self.driver.submit([SourceAdvanced(tid, RequestId(rid), generation, num_tokens, last, lists)])

    def finish(self, tid: TransferId = TID, rid: str = "p", *, held: bool = True, aborted: bool = False) -> None:
        if held:
            self.expected[RequestId(rid)] += 1
        self.driver.submit([SourceFinished(tid, RequestId(rid), is_held=held, is_aborted=aborted)])

    def prefill(self, num_tokens: int, blocks: list[int], tid: TransferId = TID, rid: str = "p") -> None:
        """A prompt that is computed in one step, from queue to end."""
        self.open_source(tid, rid)
        self.advance(num_tokens, blocks, tid=tid, rid=rid)
        self.finish(tid, rid)

    def ticket(self, direction: Direction = Direction.PUSH, tid: TransferId = TID) -> DecodeTicket:
        """What a decode engine needs to reach this one."""
        return DecodeTicket(tid, EngineId(self.name), HOST, self.channel.port, 1, 1, direction)

    def open_destination(
        self, ticket: DecodeTicket, num_tokens: int, blocks: list[int], *, first_token: int = 0, rid: str = "d"
    ) -> None:
        self.expected[RequestId(rid)] += 1
        self.may_change.update(blocks[first_token // BLOCK_SIZE :])
        lists: BlockLists = (tuple(blocks),)
        self.driver.submit([DestinationOpened(ticket, RequestId(rid), first_token, num_tokens, lists)])

    def cancel(self, rid: str = "d") -> None:
        self.driver.submit([DestinationCancelled(RequestId(rid))])

    def nothing_needed(self, ticket: DecodeTicket) -> None:
        self.driver.submit([NothingNeeded(ticket)])

    # -- what can be seen --------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        has_mail = isinstance(self.channel, MemoryChannel) and self.channel.has_mail
        return bool(self.driver._inbox) or has_mail or self.rank.mover.is_busy or self._is_notified

    @property
    def _is_notified(self) -> bool:
        """Something came through the transport that the driver is going to look at."""
        return (
            isinstance(self.rank.transport, LoopbackTransport)
            and self.transport.has_arrivals
            and len(self.driver._destination) > 0
        )

    @property
    def num_transfers(self) -> int:
        return len(self.driver._source) + len(self.driver._destination)

    def block(self, block: int) -> npt.NDArray[np.uint8]:
        return self.pool[:, block]

    def holds(self, blocks: list[int], source: Engine, source_blocks: list[int]) -> bool:
        """These blocks of ours equal those of the source when it started."""
        return bool((self.pool[:, blocks] == source.before[:, source_blocks]).all())

    def check(self) -> None:
        assert self.num_transfers == 0, f"{self.name} has transfers left"
        assert not self.rank.mover.is_busy, f"{self.name} has handles left"
        assert not any(self.rank.journal.tally._waits.values()), f"{self.name} still says that something waits"
        assert not any(self.rank.journal.tally._peers.values()), f"{self.name} still counts peers"
        assert not self.rank.journal._why, f"{self.name} remembers reasons of transfers that are over"
        if isinstance(self.rank.transport, LoopbackTransport):
            assert not self.transport.posted
        assert self.sent + self.received == self.expected, f"{self.name} did not report every request exactly once"
        untouched = [block for block in range(NUM_BLOCKS) if block not in self.may_change]
        assert (self.pool[:, untouched] == self.before[:, untouched]).all(), f"{self.name} lost a canary"

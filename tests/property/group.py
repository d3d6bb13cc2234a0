"""One engine of a stage: its ranks, its pool of blocks, and who owns which of them.

As in vLLM, one scheduler hands out the same block ids on every rank, and a request is reported when every rank has reported
it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbaton.types import RequestId
from tests.runtime.ranks import ranks
from tests.runtime.world import BLOCK_BYTES, NUM_BLOCKS, Engine, World

TOTAL_HEADS = 2


@dataclass(frozen=True)
class Claim:
    """`source` and `destination` are the two ends of one transfer; `cached` blocks take part in none."""

    end: str
    story: int
    generation: int = 0


@dataclass
class Group:
    """One process per rank, which all die together."""

    world: World
    name: str
    tp: int
    port: int
    life: int = 1
    ranks: list[Engine] = field(default_factory=list)
    owner: dict[int, Claim] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """New processes with an empty pool; the next block taken is the last given back, as where memory is short."""
        for rank in self.ranks:
            self.world.engines.remove(rank)
        self.ranks = ranks(
            self.world,
            self.name,
            port=self.port,
            tp=self.tp,
            total_heads=TOTAL_HEADS,
            incarnation=f"{self.name} life {self.life}",
        )
        self.life += 1
        self.owner = {}
        self.free = list(range(NUM_BLOCKS - 1, 0, -1))

    def crash(self) -> None:
        for rank in self.ranks:
            rank.crash()
        self.owner = {}

    @property
    def is_alive(self) -> bool:
        return self.ranks[0].is_alive

    @property
    def used_bytes(self) -> int:
        """Of a block: the heads of one rank."""
        return BLOCK_BYTES // self.tp

    def take(self, num_blocks: int, claim: Claim) -> list[int]:
        """Blocks that are this claim's from now on; none where the pool has too few."""
        if len(self.free) < num_blocks:
            return []
        taken = [self.free.pop() for _ in range(num_blocks)]
        self.own(taken, claim)
        return taken

    def own(self, blocks: list[int], claim: Claim) -> None:
        self.owner.update(dict.fromkeys(blocks, claim))

    def fill(self, blocks: list[int], value: int) -> None:
        for rank in self.ranks:
            rank.pool[:, blocks] = value

    def has_sent(self, rid: str) -> bool:
        return all(rank.sent[RequestId(rid)] for rank in self.ranks)

    def has_received(self, rid: str) -> bool:
        return all(rank.received[RequestId(rid)] for rank in self.ranks)

    def has_failed(self, rid: str) -> bool:
        return any(RequestId(rid) in rank.failures for rank in self.ranks)

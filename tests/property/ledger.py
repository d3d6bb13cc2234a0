"""Who owns which block of which engine, and what its bytes must be: fails at the first byte that moves where it must not."""

from __future__ import annotations

from dataclasses import dataclass

from kvbaton.transport.base import Operation
from tests.runtime.world import BLOCK_BYTES, NUM_BLOCKS, Engine, World

SCRIBBLE = 0xEE
_LAYER_BYTES = NUM_BLOCKS * BLOCK_BYTES


@dataclass(frozen=True)
class Claim:
    """`source` and `destination` are the two ends of one transfer; `cached` blocks take part in none."""

    end: str
    story: int
    generation: int = 0


class Ledger:
    def __init__(self, world: World) -> None:
        self._world = world
        self._free: dict[str, list[int]] = {}
        self._owner: dict[str, dict[int, Claim]] = {}
        self._base: dict[str, int] = {}
        self.is_calm = True
        """No process stood still and no word was lost: then nobody reads what its owner has given up."""
        for engine in world.engines:
            self.enter(engine)

    def enter(self, engine: Engine) -> None:
        """A process with an empty pool; the next block taken is the last given back, as an allocator under pressure does."""
        self._free[engine.name] = list(range(NUM_BLOCKS - 1, 0, -1))
        self._owner[engine.name] = {}
        self._base[engine.name] = engine.pool.ctypes.data

    def forget(self, engine: Engine) -> None:
        """Its memory is gone with it."""
        del self._free[engine.name], self._owner[engine.name], self._base[engine.name]

    @staticmethod
    def value(story: int, generation: int) -> int:
        """The bytes of that prompt's KV as computed that time."""
        return 16 * story + generation % 14 + 1

    def take(self, engine: Engine, num_blocks: int, claim: Claim) -> list[int]:
        """Blocks that are this claim's from now on; none where the pool has too few."""
        free = self._free[engine.name]
        if len(free) < num_blocks:
            return []
        taken = [free.pop() for _ in range(num_blocks)]
        self.own(engine, taken, claim)
        return taken

    def own(self, engine: Engine, blocks: list[int], claim: Claim) -> None:
        self._owner[engine.name].update(dict.fromkeys(blocks, claim))

    def give_back(self, engine: Engine, blocks: list[int], claim: Claim) -> None:
        """They are somebody else's at once, who writes into them."""
        owner = self._owner[engine.name]
        for block in blocks:
            assert owner.pop(block) == claim, f"block {block} of {engine.name} was given back twice"
        touched = self._touched(engine)
        assert not touched.intersection(blocks), f"{engine.name} gave back blocks of {claim} that are still in use"
        if blocks:
            engine.pool[:, blocks] = SCRIBBLE
        self._free[engine.name] += blocks

    def _touched(self, engine: Engine) -> set[int]:
        """Blocks that something in flight may still write, or that its own operations read; others' reads if all is calm."""
        found = set[int]()
        for poster in self._world.engines:
            if not poster.is_alive:
                continue
            for posted in poster.transport.posted.values():
                if not posted.may_move:
                    continue
                is_read_of_others = posted.operation is Operation.READ and poster is not engine
                if is_read_of_others and not self.is_calm:
                    continue  # after a lease ran out unheard; `check_delivered` looks that nobody believes it
                for ours, theirs, length in posted.pieces:
                    for address in (ours, theirs):
                        found.update(self._blocks(engine.name, address, length))
        return found

    def _blocks(self, name: str, address: int, length: int) -> range:
        offset = address - self._base[name]
        if not 0 <= offset < 2 * _LAYER_BYTES:
            return range(0)
        first = offset % _LAYER_BYTES
        return range(first // BLOCK_BYTES, (first + length - 1) // BLOCK_BYTES + 1)

    def witness(self, operation: Operation, source: int, target: int, length: int) -> None:
        """A piece is about to be copied: both sides must be ends of one story, now."""
        givers, takers = self._claims(source, length), self._claims(target, length)
        for number, taker in enumerate(takers):
            assert taker is not None, "bytes move into a block that is nobody's"
            assert taker.end == "destination", f"bytes move into a block of {taker}"
            if operation is Operation.READ and not self.is_calm:
                continue
            giver = givers[number] if givers else None
            assert not givers or (giver is not None and (giver.end, giver.story) == ("source", taker.story)), (
                f"bytes of {giver} move into a block of {taker}"
            )

    def _claims(self, address: int, length: int) -> list[Claim | None]:
        """Of the blocks there; none of a process that is gone."""
        for name, owner in self._owner.items():
            blocks = self._blocks(name, address, length)
            if blocks:
                return [owner.get(block) for block in blocks]
        return []

    def check_delivered(self, engine: Engine, blocks: list[int], story: int, generation: int) -> None:
        arrived = engine.pool[:, blocks]
        first = int(arrived.flat[0])
        assert (arrived == first).all(), "what was delivered is of several computations"
        wanted = {self.value(story, each) for each in range(generation + 1)}
        assert first in wanted, "what was delivered is not what was computed"

    def check_empty(self, engine: Engine) -> None:
        left = {block: claim for block, claim in self._owner[engine.name].items()}
        assert not left, f"{engine.name} has blocks left: {left}"

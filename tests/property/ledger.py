"""Who owns which block of which engine, and what its bytes must be: fails at the first byte that moves where it must not."""

from __future__ import annotations

from kvbaton.transport.base import Operation
from tests.property.group import TOTAL_HEADS, Claim, Group
from tests.runtime.world import BLOCK_BYTES, LAYERS, NUM_BLOCKS, Engine, World

SCRIBBLE = 0xEE
HEAD_BYTES = BLOCK_BYTES // TOTAL_HEADS
_LAYER_BYTES = NUM_BLOCKS * BLOCK_BYTES


class Ledger:
    def __init__(self, world: World, groups: list[Group]) -> None:
        self._world = world
        self._groups = groups
        self.is_calm = True
        """No process stood still and no word was lost: then nobody reads what its owner has given up."""

    @staticmethod
    def value(story: int, generation: int) -> int:
        """The bytes of that prompt's KV as computed that time."""
        return 16 * story + generation % 14 + 1

    def give_back(self, group: Group, blocks: list[int], claim: Claim) -> None:
        """They are somebody else's at once, who writes into them."""
        for block in blocks:
            assert group.owner.pop(block) == claim, f"block {block} of {group.name} was given back twice"
        for rank in group.ranks:
            self.check_idle(rank, blocks)
        if blocks:
            group.fill(blocks, SCRIBBLE)
        group.free += blocks

    def check_idle(self, engine: Engine, blocks: list[int]) -> None:
        touched = self._touched(engine).intersection(blocks)
        assert not touched, f"{engine.name} rank {engine.rank.hello.rank} gave back {touched}, which are still in use"

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
                        found.update(_blocks(engine, address, length))
        return found

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
        for group in self._groups:
            for rank in group.ranks:
                blocks = _blocks(rank, address, length) if rank.is_alive else range(0)
                if blocks:
                    return [group.owner.get(block) for block in blocks]
        return []

    def check_delivered(self, group: Group, blocks: list[int], story: int, generation: int) -> None:
        """Every head, of one computation: a prefill rank may have sent its heads before a preemption and another one after
        it, which are equal but for rounding.
        """
        wanted = {self.value(story, each) for each in range(generation + 1)}
        for rank in group.ranks:
            for start in range(0, group.used_bytes, HEAD_BYTES):
                arrived = rank.pool[:, blocks, start : start + HEAD_BYTES]
                first = int(arrived.flat[0])
                assert (arrived == first).all(), "what was delivered is of several computations"
                assert first in wanted, "what was delivered is not what was computed"


def _blocks(engine: Engine, address: int, length: int) -> range:
    offset = address - engine.pool.ctypes.data
    if not 0 <= offset < len(LAYERS) * _LAYER_BYTES:
        return range(0)
    first = offset % _LAYER_BYTES
    return range(first // BLOCK_BYTES, (first + length - 1) // BLOCK_BYTES + 1)

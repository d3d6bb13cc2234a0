"""Blocks of sliding-window groups that a hand-off still needs when vLLM gives them up.

As soon as a prompt is computed vLLM frees the window block that only the prompt's last token looked at, and with every
further token more. The decode side computes that last token itself and needs them. Invariant: a block pinned here is in no
other request's hands until the worker is done with the hand-off. Next: scheduler.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from kvbaton.runtime.events import BlockLists
from kvbaton.types import RequestId

Block = TypeVar("Block")


class BlockPool(Protocol[Block]):
    """What we use of vLLM's block pool."""

    @property
    def blocks(self) -> Sequence[Block]: ...

    def touch(self, blocks: Sequence[Block]) -> None: ...

    def free_blocks(self, ordered_blocks: Sequence[Block]) -> None: ...


class WindowPins(Generic[Block]):
    def __init__(self, pool: BlockPool[Block], windowed_groups: Sequence[int], max_steps_in_flight: int) -> None:
        self._pool = pool
        self._windowed_groups = windowed_groups
        self._max_steps_in_flight = max_steps_in_flight
        self._num_steps = 0
        self._pinned: dict[RequestId, list[Block]] = {}
        # (the step by which every step in flight now has run, blocks that those may still write)
        self._lost: deque[tuple[int, list[Block]]] = deque()

    def step(self) -> None:
        """One more step is being scheduled."""
        self._num_steps += 1
        while self._lost and self._lost[0][0] <= self._num_steps:
            self._free(self._lost.popleft()[1])

    def pin(self, request_id: RequestId, blocks: BlockLists) -> None:
        """Once per generation. Block 0 stands for one that is given up already."""
        held = [self._pool.blocks[block] for group in self._windowed_groups for block in blocks[group] if block != 0]
        self._pool.touch(held)
        self._pinned.setdefault(request_id, []).extend(held)

    def lose(self, request_id: RequestId) -> None:
        """The request was preempted; steps in flight may still write its blocks, and the next one reads them no more."""
        blocks = self._pinned.pop(request_id, None)
        if blocks:
            self._lost.append((self._num_steps + self._max_steps_in_flight, blocks))

    def release(self, request_id: RequestId) -> None:
        """The worker is done with the hand-off."""
        self._free(self._pinned.pop(request_id, []))

    def _free(self, blocks: list[Block]) -> None:
        self._pool.free_blocks(blocks[::-1])  # the last tokens' first: what comes first in a prompt is shared most

    @property
    def has_lost(self) -> bool:
        return bool(self._lost)

    def __len__(self) -> int:
        return len(self._pinned) + len(self._lost)

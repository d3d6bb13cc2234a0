"""How transfers ended, kept for a while, so that whoever asks late gets an answer instead of a timeout.

Invariant: bounded in number and in time. The time limit matters for routers that send no `transfer_id`: their retries
pair by a request id they may use again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvbaton.types import Outcome, TransferId


@dataclass(frozen=True)
class Memory:
    outcome: Outcome
    reason: str
    until_s: float


class Remembered:
    def __init__(self, max_entries: int = 4096, keep_s: float = 60.0) -> None:
        self._max_entries = max_entries
        self._keep_s = keep_s
        self._memories: OrderedDict[TransferId, Memory] = OrderedDict()

    def add(self, transfer_id: TransferId, outcome: Outcome, reason: str, now_s: float) -> None:
        self._memories.pop(transfer_id, None)
        self._memories[transfer_id] = Memory(outcome, reason, now_s + self._keep_s)
        if len(self._memories) > self._max_entries:
            self._memories.popitem(last=False)

    def recall(self, transfer_id: TransferId, now_s: float) -> Memory | None:
        memory = self._memories.get(transfer_id)
        return memory if memory is not None and now_s < memory.until_s else None

"""Which of the requests that share one ticket loads: `n > 1` makes several requests of one prompt, each with its ticket.

Invariant: at most one of them is registered at any time, and what is known of a ticket is forgotten with the last request
that has it and the end of its last load. Pure. Next: scheduler.py.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import TypeAlias

from kvbaton.protocol.params import DecodeTicket
from kvbaton.types import EngineId, RequestId, TransferId

Key: TypeAlias = tuple[EngineId, TransferId]


@dataclass
class _Sharers:
    members: set[RequestId] = field(default_factory=set)
    loader: RequestId | None = None
    is_settled: bool = False
    """Delivered, or nothing of it is needed: whoever comes now has it in the prefix cache, or computes it."""


class SharedTickets:
    def __init__(self) -> None:
        self._sharers: dict[Key, _Sharers] = {}
        self._loads: dict[RequestId, Key] = {}

    def join(self, ticket: DecodeTicket, request_id: RequestId) -> None:
        self._sharers.setdefault(_key(ticket), _Sharers()).members.add(request_id)

    def is_loading(self, ticket: DecodeTicket) -> bool:
        return self._sharers[_key(ticket)].loader is not None

    def is_settled(self, ticket: DecodeTicket) -> bool:
        return self._sharers[_key(ticket)].is_settled

    def start(self, ticket: DecodeTicket, request_id: RequestId) -> None:
        """`request_id` has registered; the others wait for it."""
        self._sharers[_key(ticket)].loader = request_id
        self._loads[request_id] = _key(ticket)

    def settle(self, ticket: DecodeTicket) -> bool:
        """Nothing is to be loaded. True when the prefill side has to be told so: nobody has loaded or said it before."""
        sharers = self._sharers[_key(ticket)]
        is_news = not sharers.is_settled and sharers.loader is None
        sharers.is_settled = True
        return is_news

    def end(self, request_id: RequestId, failed: Container[str]) -> None:
        """A load came to rest, also one whose request was given up meanwhile. After a failure the next one may try."""
        key = self._loads.pop(request_id, None)
        if key is None:
            return
        sharers = self._sharers[key]
        sharers.loader = None
        sharers.is_settled = sharers.is_settled or request_id not in failed
        self._forget_unused(key)

    def leave(self, ticket: DecodeTicket, request_id: RequestId) -> bool:
        """The request is over. True when nobody else has the ticket and nothing was ever loaded or refused with it."""
        sharers = self._sharers[_key(ticket)]
        sharers.members.discard(request_id)
        is_untouched = not sharers.members and not sharers.is_settled and sharers.loader is None
        self._forget_unused(_key(ticket))
        return is_untouched

    def _forget_unused(self, key: Key) -> None:
        if not self._sharers[key].members and self._sharers[key].loader is None:
            del self._sharers[key]

    def __len__(self) -> int:
        return len(self._sharers) + len(self._loads)


def _key(ticket: DecodeTicket) -> Key:
    return ticket.engine_id, ticket.transfer_id

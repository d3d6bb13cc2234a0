"""kv_transfer_params as a router sends them, and what the connector makes of them."""

from __future__ import annotations

from kvbaton.protocol.params import DecodeTicket
from kvbaton.types import Direction, EngineId, TransferId

PREFILL: dict[str, object] = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t"}
PUSH: dict[str, object] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "transfer_id": "t",
    "remote_engine_id": "engine p",
    "remote_host": "127.0.0.1",
    "remote_port": 5555,
}
PULL: dict[str, object] = PUSH | {"remote_block_ids": [[1, 2, 3]], "remote_request_id": "p", "remote_num_tokens": 10}


def ticket(transfer_id: str = "t", direction: Direction = Direction.PUSH) -> DecodeTicket:
    return DecodeTicket(TransferId(transfer_id), EngineId("engine p"), "127.0.0.1", 5555, 1, 1, direction)

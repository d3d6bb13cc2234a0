"""The router's part of the timeline: one JSON line per event, as docs/decisions/001-seams.md fixes it.

Invariant: a line is written whole; the file is flushed whenever a request has finished. Read next: `relay.py`, which emits.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from kvbaton.errors import UsageError
from kvbaton.types import TransferId


class Trace:
    """An open trace file, or nothing at all when there is no path. Raises UsageError if the file cannot be opened."""

    def __init__(self, path: str | None) -> None:
        self._file: BinaryIO | None = None
        if path is not None:
            try:
                self._file = Path(path).open("ab")  # noqa: SIM115 - open as long as the router
            except OSError as error:
                raise UsageError(f"The trace file {path} cannot be opened: {error.strerror}.") from None

    def event(self, event: str, transfer_id: TransferId, **fields: str | int) -> None:
        if self._file is None:
            return
        line = {"t_unix_s": time.time(), "who": "router", "event": event, "transfer_id": transfer_id, **fields}
        self._file.write(msgspec.json.encode(line) + b"\n")
        if event == "finished":
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

"""The timeline: one JSON line per event, appended to a file (docs/decisions/001-seams.md has the events).

Invariant: tracing never fails a transfer. When the file cannot be written, one warning is logged and tracing ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from pathlib import Path
from typing import TextIO, TypeAlias

from kvbaton.types import TransferId

logger = logging.getLogger("vllm.kvbaton.trace")

TraceField: TypeAlias = str | float | bool | None


class Trace:
    def __init__(self, path: str | None, who: str) -> None:
        self._who = who
        self._file: TextIO | None = None
        if path is not None:
            try:
                # Line buffering: each line is one write, so two writers of one file do not tear each other's lines.
                self._file = Path(path).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115  closed in close()
            except OSError as error:
                logger.warning("No timeline is written: %s", error)

    @property
    def is_on(self) -> bool:
        return self._file is not None

    def emit(self, event: str, transfer_id: TransferId, **fields: TraceField) -> None:
        if self._file is None:
            return
        line = {"t_unix_s": time.time(), "who": self._who, "event": event, "transfer_id": transfer_id, **fields}
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:
            logger.warning("The timeline ends here: %s", error)
            self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # what a full disk did not take is written again on closing
                self._file.close()
            self._file = None

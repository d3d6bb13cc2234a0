"""Waiting for a moment in a transfer's life, as the engines' own timelines tell it."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from kvbaton.launch.supervisor import Instance

_EVERY_S = 0.005


class Watch:
    """Events that an instance's timeline gains from now on."""

    def __init__(self, instance: Instance) -> None:
        assert instance.trace_path is not None
        self._path: Path = instance.trace_path
        self._name = instance.name
        self._offset = self._path.stat().st_size if self._path.exists() else 0

    def wait_for(self, event: str, *, timeout_s: float = 60.0) -> dict[str, object]:
        """The next event of this name; what comes before it is passed over."""
        give_up_at_s = time.monotonic() + timeout_s
        seen: list[object] = []
        while time.monotonic() < give_up_at_s:
            for line in self._new_lines():
                seen.append(line["event"])
                if line["event"] == event:
                    return line
            time.sleep(_EVERY_S)
        raise AssertionError(f"no {event} in {self._name}'s timeline within {timeout_s} s, but {seen[-10:]}")

    def _new_lines(self) -> list[dict[str, object]]:
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as trace:
            trace.seek(self._offset)
            whole = trace.read().rpartition(b"\n")[0]
            self._offset += len(whole) + bool(whole)
            return [json.loads(line) for line in whole.splitlines() if line]
        return []

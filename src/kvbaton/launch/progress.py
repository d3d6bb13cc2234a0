"""Shows how a start goes: a live table on a terminal, a plain line now and then elsewhere, nothing for programs.

Invariant: showing never decides anything; the supervisor passes the same rows to each of the three.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Protocol, TextIO

import msgspec

_PLAIN_EVERY_S = 5.0


class Row(msgspec.Struct, frozen=True):
    """One process, as shown."""

    name: str
    where: str
    stage: str
    elapsed_s: float
    ready: bool


class Progress(Protocol):
    """What the supervisor reports to."""

    def note(self, text: str) -> None:
        """One thing happened."""

    def update(self, rows: Sequence[Row]) -> None:
        """How far everybody is; called several times a second."""

    def done(self) -> None:
        """No more updates for now."""


class Silent:
    """For tests and benchmarks."""

    def note(self, text: str) -> None:
        del text

    def update(self, rows: Sequence[Row]) -> None:
        del rows

    def done(self) -> None:
        pass


class Plain:
    """For logs: a line when somebody becomes ready, and every few seconds for who does not."""

    def __init__(self, out: TextIO | None = None, every_s: float = _PLAIN_EVERY_S) -> None:
        self._out = out or sys.stdout
        self._every_s = every_s
        self._ready: set[str] = set()
        self._next_s = time.monotonic() + every_s

    def note(self, text: str) -> None:
        self._out.write(f"{text}\n")
        self._out.flush()

    def update(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row.ready and row.name not in self._ready:
                self._ready.add(row.name)
                self.note(f"{row.name}: ready after {row.elapsed_s:.1f} s, {row.where}")
        waiting = [row for row in rows if not row.ready]
        if not waiting:
            self._next_s = time.monotonic() + self._every_s
        elif time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + self._every_s
            self.note("waiting: " + "; ".join(f"{row.name} {row.stage} ({row.elapsed_s:.0f} s)" for row in waiting))

    def done(self) -> None:
        pass


class Live:
    """For people: one row per process, redrawn in place."""

    def __init__(self) -> None:
        from rich.console import Console  # noqa: PLC0415 - drawn only on a terminal
        from rich.live import Live as RichLive  # noqa: PLC0415

        self._console = Console()
        self._new_live = RichLive
        self._live: RichLive | None = None

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def update(self, rows: Sequence[Row]) -> None:
        from rich.table import Table  # noqa: PLC0415

        table = Table.grid(padding=(0, 2))
        for row in rows:
            mark = "[green]●[/]" if row.ready else "[yellow]○[/]"
            stage = "ready" if row.ready else row.stage
            table.add_row(mark, row.name, stage, f"{row.elapsed_s:5.1f} s", f"[dim]{row.where}[/]")
        if self._live is None:
            self._live = self._new_live(table, console=self._console, refresh_per_second=8)
            self._live.start()
        self._live.update(table)

    def done(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def progress_for(out: TextIO) -> Progress:
    """Live on a terminal, plain lines elsewhere."""
    return Live() if out.isatty() else Plain(out)

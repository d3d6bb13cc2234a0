"""A process that cannot be mistaken for a later one with the same number.

Invariant: a signal reaches the process that was meant or nobody: the kernel's start time is compared after a pidfd has
pinned the number. Linux only, as the whole launcher.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec


class Identity(msgspec.Struct, frozen=True):
    """A process: its number, and when the kernel started it (clock ticks since boot)."""

    pid: int
    started_ticks: int

    @classmethod
    def of(cls, pid: int) -> Identity | None:
        """The process that has this number now; None when it is gone or only waits to be reaped."""
        fields = _stat(pid)
        return None if fields is None or fields[0] == "Z" else cls(pid, int(fields[19]))

    def alive(self) -> bool:
        return Identity.of(self.pid) == self

    def send(self, number: signal.Signals) -> bool:
        """Whether the signal was delivered to this very process."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if not self.alive():
                return False
            signal.pidfd_send_signal(fd, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(fd)
        return True


def wait_gone(processes: Iterable[Identity], timeout_s: float) -> list[Identity]:
    """Those still alive after at most `timeout_s`."""
    give_up_at_s = time.monotonic() + timeout_s
    left = [process for process in processes if process.alive()]
    while left and time.monotonic() < give_up_at_s:
        time.sleep(0.05)
        left = [process for process in left if process.alive()]
    return left


def descendants(pid: int) -> list[Identity]:
    """Every process below `pid`, children before grandchildren."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(folder.name))
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found: list[Identity] = []
    queue = [pid]
    for parent in queue:
        queue += children.get(parent, [])
        found += [each for each in map(Identity.of, children.get(parent, [])) if each is not None]
    return found


def session_members(leader: Identity) -> list[Identity]:
    """Who is left in the session that `leader` led; nobody's business once the number is somebody else's."""
    now = Identity.of(leader.pid)
    if now is not None and now != leader:
        return []
    # While a session has members its number is not given out again, so these are the leader's.
    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    found = [Identity.of(pid) for pid in pids if (fields := _stat(pid)) and int(fields[3]) == leader.pid]
    return [each for each in found if each is not None and each != leader]


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat after the command name: state, parent, ..."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return None

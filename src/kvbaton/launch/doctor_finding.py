"""What a check of the doctor says. Invariant: whatever is not in order carries its remedy."""

from __future__ import annotations

import enum

import msgspec


class Level(enum.Enum):
    """OK: nothing to do. WARN: works, with less speed or certainty. FAIL: engines will not run."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(msgspec.Struct, frozen=True):
    """One line of the report."""

    level: Level
    check: str
    found: str
    remedy: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(Level.OK, check, found)


def warn(check: str, found: str, remedy: str) -> Finding:
    return Finding(Level.WARN, check, found, remedy)


def fail(check: str, found: str, remedy: str) -> Finding:
    return Finding(Level.FAIL, check, found, remedy)

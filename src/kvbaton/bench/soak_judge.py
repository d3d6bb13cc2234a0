"""What an answer is worth: right, wrong, an honest failure, or one of the kinds that must not be.

Invariant: pure. Whatever tokens were heard are compared, also those before an error or before the client left: a token
that differs is WRONG whatever else happened. Read `soak_client` for how an answer is heard.

| heard | verdict |
|---|---|
| a token that differs from the expected one | WRONG |
| nothing more until the deadline | HUNG |
| the client left | LEFT |
| all tokens and a proper end | RIGHT |
| a 5xx or 429 with an error object that gives a reason, or such an object within the stream | FAILED |
| anything else: 200 and too few tokens, a cut connection, an error without a reason, a 4xx for a good request | DISHONEST |
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

_OK = 200
_RETRYABLE = frozenset({429, *range(500, 600)})


class Verdict(enum.Enum):
    RIGHT = "right"
    WRONG = "wrong"
    LEFT = "left"
    FAILED = "failed"
    DISHONEST = "dishonest"
    HUNG = "hung"


class Fault(msgspec.Struct, frozen=True):
    """The `error` object of an answer."""

    message: str = ""
    type: str = ""
    code: str | int | None = None

    @property
    def label(self) -> str:
        """The most specific class it names."""
        return str(self.code or self.type or "no class")


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt as the client saw it."""

    status: int | None
    """None: the connection gave no status line."""
    tokens: tuple[int, ...] = ()
    fault: Fault | None = None
    is_whole: bool = False
    """The body came to its proper end."""
    has_left: bool = False
    is_late: bool = False
    broken: str | None = None
    """What the connection or the decoder complained of."""


def judge(heard: Heard, expected: Sequence[int]) -> Verdict:
    """By the table above. `expected` are all tokens that were asked for."""
    if tuple(expected[: len(heard.tokens)]) != heard.tokens:
        return Verdict.WRONG
    if heard.is_late:
        return Verdict.HUNG
    if heard.has_left:
        return Verdict.LEFT
    if heard.status == _OK and heard.fault is None and heard.is_whole and len(heard.tokens) == len(expected):
        return Verdict.RIGHT
    is_error = heard.status in _RETRYABLE or heard.status == _OK
    if is_error and heard.fault is not None and heard.fault.message and heard.broken is None:
        return Verdict.FAILED
    return Verdict.DISHONEST


def reason(heard: Heard) -> str:
    """Why there was no answer, in a few words that are the same for the same cause."""
    if heard.is_late:
        return "no end before the deadline"
    if heard.fault is not None:
        return heard.fault.label
    if heard.broken is not None:
        return heard.broken
    return "an end without enough tokens" if heard.status == _OK else "no error object"

"""Strict decoding of configuration: an unknown key is an error that lists close matches.

Every program's settings are one frozen msgspec struct; this module turns a mapping into it with errors a user can act on.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from kvbaton.errors import UsageError

S = TypeVar("S", bound=msgspec.Struct)


def decode_config(values: Mapping[str, object], into: type[S], *, what: str) -> S:
    """`values` as a validated `into`.

    Raises UsageError naming `what`, the key and the remedy, for an unknown key or a value of the wrong type or range.
    """
    known = [field.encode_name for field in msgspec.structs.fields(into)]
    for key in values:
        if key not in known:
            raise UsageError(f"{what}: unknown key {key!r}. {_suggest(key, known)}")
    try:
        return msgspec.convert(dict(values), into, strict=True)
    except msgspec.ValidationError as error:
        raise UsageError(f"{what}: {error}. Known keys: {', '.join(known)}.") from None


def _suggest(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=3)
    if close:
        return f"Did you mean {' or '.join(repr(match) for match in close)}?"
    return f"Known keys: {', '.join(known)}."

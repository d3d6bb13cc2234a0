"""One tree of exceptions, drawn at its top; every class says what to do about it."""

from __future__ import annotations

import inspect
import re

import pytest

from kvbaton import errors
from kvbaton.errors import BatonError, Remedy

CLASSES = [each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, BatonError)]


@pytest.mark.parametrize("error", CLASSES)
def test_every_error_has_a_remedy(error: type[BatonError]) -> None:
    assert isinstance(error.remedy, Remedy)


def test_every_remedy_is_somebodys() -> None:
    assert {error.remedy for error in CLASSES} == set(Remedy)


def test_the_drawing_is_the_tree() -> None:
    drawn: dict[str, str] = {}
    parents: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.fullmatch(r"([│├└─\s]*)([A-Z]\w+)(\s{2,}.*)?", line)
        if match is None or match[1].strip("│├└─ ") or (not match[1] and match[2] != "BatonError"):
            continue
        depth = len(match[1]) // 4
        parents[depth:] = [match[2]]
        drawn[match[2]] = parents[depth - 1] if depth else "Exception"
    assert drawn == {error.__name__: error.__bases__[0].__name__ for error in CLASSES}

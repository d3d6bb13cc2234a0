"""docs/reliability.md and docs/security.md name tests; every one of them exists. Those still to come are marked TODO(test)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"(?<!TODO\(test\) )`(tests/[\w/]+\.py)::(\w+)`")


def named() -> list[tuple[str, str]]:
    pages = [(ROOT / "docs" / page).read_text() for page in ("reliability.md", "security.md")]
    return sorted(set(NAMED.findall("\n".join(pages))))


def test_the_page_is_about_something() -> None:
    assert len(named()) > 60


@pytest.mark.parametrize(("file", "test"), named())
def test_a_test_that_is_named_exists(file: str, test: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert test in functions, f"{file} has no {test}; mend the page in docs that names it"

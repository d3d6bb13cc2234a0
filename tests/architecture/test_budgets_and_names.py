"""Sizes and names that reviews should not have to argue about, and documents in step with the code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "kvbaton").rglob("*.py"))

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_INSTANCE_ATTRIBUTES = 20
BANNED = re.compile(r"manager|handler|helper|utils|common|misc", re.IGNORECASE)


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in SOURCES:
        yield path, ast.parse(path.read_text())


def nodes_of(kind: type[ast.AST]) -> Iterator[tuple[Path, ast.AST]]:
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, kind):
                yield path, node


def test_files_are_small() -> None:
    too_long = {path.name: n for path in SOURCES if (n := len(path.read_text().splitlines())) > MAX_FILE_LINES}
    assert not too_long


def test_functions_are_small() -> None:
    too_long = {
        f"{path.name}:{node.name}": node.end_lineno - node.lineno + 1
        for path, node in [*nodes_of(ast.FunctionDef), *nodes_of(ast.AsyncFunctionDef)]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    }
    assert not too_long


def instance_attributes(node: ast.ClassDef) -> set[str]:
    return {
        target.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Assign | ast.AnnAssign)
        for target in (inner.targets if isinstance(inner, ast.Assign) else [inner.target])
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    }


def test_no_object_holds_everything() -> None:
    too_many = {
        f"{path.name}:{node.name}": len(attributes)
        for path, node in nodes_of(ast.ClassDef)
        if isinstance(node, ast.ClassDef) and len(attributes := instance_attributes(node)) > MAX_INSTANCE_ATTRIBUTES
    }
    assert not too_many


def test_names_say_what_a_thing_is() -> None:
    modules = [path.stem for path in SOURCES]
    classes = [node.name for _, node in nodes_of(ast.ClassDef) if isinstance(node, ast.ClassDef)]
    assert not [name for name in modules + classes if BANNED.search(name)]


def test_every_module_says_what_it_is_for() -> None:
    assert not [str(path.relative_to(ROOT)) for path, tree in trees() if not ast.get_docstring(tree)]


def test_import_contracts_hold() -> None:
    lint_imports = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint_imports, "--no-logo"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def functions_of(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def walk_of_one_request() -> list[tuple[str, str]]:
    """(file, function) pairs named in docs/one-request.md, written as `file.py` `function`."""
    text = (ROOT / "docs" / "one-request.md").read_text()
    return re.findall(r"`([a-z_/]+\.py)` `([a-z_]+)`", text)


def test_the_walk_is_long_enough_to_mean_something() -> None:
    assert len(walk_of_one_request()) >= 20


@pytest.mark.parametrize(("file", "function"), walk_of_one_request())
def test_the_walk_of_one_request_names_what_exists(file: str, function: str) -> None:
    path = ROOT / "src" / "kvbaton" / file
    assert path.exists(), f"{file} is gone; mend docs/one-request.md"
    assert function in functions_of(path), f"{file} has no {function}; mend docs/one-request.md"


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/gpu.md"])
def test_documents_name_files_that_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    named = re.findall(r"`((?:tests|docs|scripts|src)/[\w./-]+)`", text)
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]

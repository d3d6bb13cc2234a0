"""NIXL's progress thread made to wait, without touching an installed file: for the rows called "hand-edited".

NIXL's Python agent sets `pthrDelay = 0`, so that its progress thread polls without a pause and takes a whole core from
each worker; no option of NIXL, UCX or vLLM reaches that value. On a machine with few cores that starves the engine itself,
and a comparison with the unedited library would measure little else. vLLM's connectors import the package `nixl`, which
stands for `nixl_cu12`: both names lead to the one `_bindings` module that is edited here as it is imported.

Invariant: an engine gets the edit by its PYTHONPATH alone, and says in its log that it took; without that line a row must
not be called hand-edited. Read `modes` for the rows.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path

from kvbaton.launch.remedy import deployment_error
from kvbaton.launch.supervisor import Instance

DELAY_US = 1000
_MARK = "kvbaton: NIXL hand-edited"
_TAIL_BYTES = 1 << 20

SITECUSTOMIZE = f'''\
"""Made by `kvbaton bench compare`: NIXL agents of this process wait {DELAY_US} us between two polls."""

import importlib.abc
import importlib.util
import sys

BINDINGS = tuple(f"{{package}}._bindings" for package in ("nixl_cu12", "nixl_cu13"))


def edit(bindings):
    shipped = bindings.nixlAgentConfig

    class nixlAgentConfig(shipped):
        # The agent sets 0 after it has made its configuration: whatever is set, this is what is stored.
        pthrDelay = property(
            lambda self: shipped.pthrDelay.__get__(self),
            lambda self, delay: shipped.pthrDelay.__set__(self, {DELAY_US}),
        )

    bindings.nixlAgentConfig = nixlAgentConfig
    sys.stderr.write(f"{_MARK}: {{bindings.__name__}}, pthrDelay = {DELAY_US} us\\n")


class Loader(importlib.abc.Loader):
    def __init__(self, loader):
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        edit(module)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in BINDINGS:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None:
            spec.loader = Loader(spec.loader)
        return spec


sys.meta_path.insert(0, Finder())
'''


def write_hand_edit(folder: Path) -> dict[str, str]:
    """What an engine's environment needs for the edit, which is now in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE, encoding="utf-8")
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": str(folder.absolute()) + (os.pathsep + inherited if inherited else "")}


def check_hand_edit(instances: Iterable[Instance]) -> None:
    """DeploymentError when an engine does not say that it was edited."""
    for instance in instances:
        with instance.log_path.open("rb") as log:
            said = log.read(_TAIL_BYTES)
        if _MARK.encode() not in said:
            raise deployment_error(
                f"{instance.name} runs with NIXL as shipped: the hand edit did not take",
                f"Its log says what it imported instead: {instance.log_path}",
            )


def check_nixl_package() -> None:
    """DeploymentError when vLLM's own connectors would find no NIXL: they import `nixl`, and not `nixl_cu12`."""
    if importlib.util.find_spec("nixl") is None:
        raise deployment_error(
            "vLLM's own connectors import the package `nixl`, which is not installed",
            "pip install --no-deps nixl (a few kB that stand for nixl-cu12)",
        )

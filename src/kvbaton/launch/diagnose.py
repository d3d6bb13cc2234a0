"""Why a process died, in one line, and what to do about it.

Invariant: a pure reading of the log and the exit code; it never hides the log, it only points at the line that matters.
"""

from __future__ import annotations

import re
import signal

import msgspec

from kvbaton.launch.ready import last_lines

_SHOWN_LINES = 20
_SEARCHED_LINES = 400
_SIGNALLED = 128
_RAISED = re.compile(r"\b(?:[A-Za-z_][\w.]*(?:Error|Exception|Unsupported|Incompatible|Refused))\s*:\s*\S")
_COMPLAINT = re.compile(r"\b(error|fatal|failed|cannot|not found)\b", re.IGNORECASE)
# Lines which only say that something else, further up, went wrong.
_ECHO = re.compile(
    r"Engine core (initialization|proc) failed|See root cause above|EngineDeadError|WorkerProc initialization failed"
)

# Says nothing about a death: harmless levels, and the list of routes that would fill the end of a log.
_HARMLESS = re.compile(r"\b(INFO|WARNING|DEBUG)\b")
_NOISE = re.compile(r"\bRoute: /")

_REMEDIES = (
    (r"address already in use", "Another program took the port meanwhile: start again, or choose another port."),
    (
        r"No available memory for the cache|is larger than the (maximum|available)|needed, which is larger",
        "Raise --kv-cache-gib or lower --max-model-len.",
    ),
    (
        r"nms does not exist",
        "torchvision does not match torch: uninstall torchvision (text models need none), then run `kvbaton doctor`.",
    ),
    (r"No package metadata was found for", "This Python environment is incomplete: run `kvbaton doctor`."),
    (r"No module named '?nixl|NIXL is not available", "Install NIXL: pip install 'kvbaton[nixl]'."),
    (
        r"No module named '?kvbaton\.(?!launch)",
        "This part of kvbaton is not installed in the engine's environment: run `kvbaton doctor`.",
    ),
    (r"No module named '?(starlette|uvicorn|aiohttp)", "Install the router: pip install 'kvbaton[router]'."),
    (
        r"unrecognized arguments|invalid choice|ambiguous option",
        "Correct the flag in --engine-args, --prefill-args or --decode-args.",
    ),
    (r"Unsupported connector type|kv_connector", "Check --connector and --connector-config against this vLLM version."),
    (
        r"vllm: No such file|: No such file or directory$",
        "Install vLLM in this environment; `kvbaton doctor` says how.",
    ),
    (r"out of memory|Cannot allocate memory|MemoryError", "Lower --kv-cache-gib, or use fewer engines."),
    (
        r"couldn't connect to .*|OfflineModeIsEnabled|is not a local folder",
        "Name a prepared model (`kvbaton models list`) or a local folder.",
    ),
)


class Diagnosis(msgspec.Struct, frozen=True):
    """What is known about a death."""

    how: str
    line: str | None
    remedy: str
    tail: tuple[str, ...]

    def text(self) -> str:
        """For a terminal: the end of the log, then the line that says most."""
        shown = [f"  | {line}" for line in self.tail]
        return "\n".join([*shown, f"  most telling: {self.line}"] if self.line else shown)


def diagnose(log_path: str, exit_code: int | None) -> Diagnosis:
    """What the log at `log_path` and the exit code say. None as exit code: it is still running."""
    lines = [line for line in last_lines(log_path, _SEARCHED_LINES) if line.strip() and not _NOISE.search(line)]
    line = telling_line(lines)
    return Diagnosis(_how(exit_code), line, _remedy(lines, line, exit_code, log_path), tuple(lines[-_SHOWN_LINES:]))


def telling_line(lines: list[str]) -> str | None:
    """The last exception that is not an echo of another; failing that, the last line that complains."""
    for pattern in (_RAISED, _COMPLAINT):
        found = [
            line for line in lines if pattern.search(line) and not _ECHO.search(line) and not _HARMLESS.search(line)
        ]
        if found:
            return found[-1].strip()
    return None


def _how(exit_code: int | None) -> str:
    if exit_code is None:
        return "is still running"
    if exit_code <= _SIGNALLED:
        return f"ended with exit code {exit_code}"
    try:
        return f"was ended by {signal.Signals(exit_code - _SIGNALLED).name}"
    except ValueError:
        return f"ended with exit code {exit_code}"


def _remedy(lines: list[str], line: str | None, exit_code: int | None, log_path: str) -> str:
    for text in (line or "", "\n".join(lines)):
        for pattern, remedy in _REMEDIES:
            if re.search(pattern, text, re.IGNORECASE | re.MULTILINE):
                return remedy
    if exit_code == _SIGNALLED + signal.SIGKILL:
        return "Something killed it, often the kernel for want of memory: lower --kv-cache-gib, or use fewer engines."
    return f"Read the whole log: {log_path}"

"""Asks a server over HTTP whether it serves, and reads from its log how far it has come.

Invariant: every question has a timeout of its own and no answer is an exception; proxies are never involved.
"""

from __future__ import annotations

import http.client
import re
from pathlib import Path

import msgspec

_PROBE_TIMEOUT_S = 2.0
_TAIL_BYTES = 16_384

# vLLM's own words, latest first, and what it does after saying them. A new wording only costs the label.
_STAGES = (
    (re.compile(r"Starting vLLM (API )?server|Application startup complete"), "opening its port"),
    (re.compile(r"init engine \("), "preparing to serve"),
    (re.compile(r"KV cache size|# (GPU|CPU) blocks"), "warming up"),
    (re.compile(r"Loading weights took|Model loading took"), "reserving the KV cache"),
    (re.compile(r"Starting to load model"), "loading weights"),
    (re.compile(r"Initializing a V1 LLM engine"), "setting up its worker"),
    (re.compile(r"non-default args|Resolved architecture"), "starting its engine core"),
)


class Answer(msgspec.Struct, frozen=True):
    """A server's answer, whatever its status."""

    status: int
    body: bytes

    @property
    def ok(self) -> bool:
        return self.status == http.client.OK


def ask(
    host: str, port: int, path: str, body: dict[str, object] | None = None, timeout_s: float = _PROBE_TIMEOUT_S
) -> Answer | None:
    """GET `path`, or POST `body` to it; None when the server could not be reached or did not answer in time."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, msgspec.json.encode(body), headers)
        response = connection.getresponse()
        return Answer(response.status, response.read())
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def serves(host: str, port: int) -> bool:
    """Whether it is healthy and lists a model."""
    health = ask(host, port, "/health")
    if health is None or not health.ok:
        return False
    models = ask(host, port, "/v1/models")
    return models is not None and models.ok


def stage(log_path: str) -> str:
    """How far an engine has come, in a few words."""
    tail = "\n".join(last_lines(log_path, 120))
    return next((label for pattern, label in _STAGES if pattern.search(tail)), "importing")


def last_lines(log_path: str, count: int) -> list[str]:
    """The last lines of a log, newest last; none when there is no log."""
    try:
        with Path(log_path).open("rb") as log:
            size = log.seek(0, 2)
            log.seek(max(0, size - _TAIL_BYTES * max(1, count // 80)))
            return log.read().decode(errors="replace").splitlines()[-count:]
    except FileNotFoundError:
        return []

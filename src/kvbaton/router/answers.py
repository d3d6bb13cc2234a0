"""PURE. What the router says in its own words: errors in OpenAI's shape, and why a leg failed.

Invariant: an error the router makes names the instance, says whether to retry, and never hides an engine's own answer
(that one is passed on as it came). Read next: `flow.py`.
"""

from __future__ import annotations

import enum

import msgspec

Headers = tuple[tuple[bytes, bytes], ...]


class Side(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class Answer(msgspec.Struct, frozen=True):
    """A complete HTTP answer, an engine's or ours."""

    status: int
    headers: Headers
    body: bytes

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300


class FailureKind(enum.Enum):
    """Why a leg ended without a usable answer; the value is the error code clients see, after the side's name."""

    UNREACHABLE = "unreachable"
    CONNECT_TIMEOUT = "connect_timeout"
    TIMEOUT = "timeout"
    BROKEN = "connection_lost"
    BAD_ANSWER = "bad_answer"
    MOVED = "identity_unstable"
    NOT_READY = "not_ready"


class LegFailure(msgspec.Struct, frozen=True):
    kind: FailureKind
    detail: str


_STATUS = {
    FailureKind.UNREACHABLE: 503,
    FailureKind.CONNECT_TIMEOUT: 504,
    FailureKind.TIMEOUT: 504,
    FailureKind.BROKEN: 502,
    FailureKind.BAD_ANSWER: 502,
    FailureKind.MOVED: 503,
    FailureKind.NOT_READY: 503,
}
JSON_HEADERS: Headers = ((b"content-type", b"application/json"),)
_RETRY_HEADERS: Headers = (*JSON_HEADERS, (b"retry-after", b"1"))


def error_body(message: str, *, kind: str, code: str, param: str | None = None) -> bytes:
    """OpenAI's error object, encoded."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def rejection(status: int, message: str, *, code: str, param: str | None = None) -> Answer:
    """A client's mistake."""
    return Answer(status, JSON_HEADERS, error_body(message, kind="invalid_request_error", code=code, param=param))


def unavailable(reason: str) -> Answer:
    """503: nobody can serve this now."""
    message = f"The request cannot be served now: {reason}. Retry in a moment."
    return Answer(503, _RETRY_HEADERS, error_body(message, kind="service_unavailable", code="not_ready"))


def lost_answer(side: Side, url: str, failure: LegFailure) -> Answer:
    """Nothing has been sent to the client yet: an honest, retryable status."""
    status = _STATUS[failure.kind]
    headers = _RETRY_HEADERS if status == 503 else JSON_HEADERS
    return Answer(status, headers, _lost_body(side, url, failure, "No part of an answer was sent; retry the request."))


def lost_event(side: Side, url: str, failure: LegFailure) -> bytes:
    """The stream is cut short: one SSE event that says so.

    Begins with a blank line, so that an event which the engine left unfinished does not swallow it.
    """
    body = _lost_body(side, url, failure, "The answer above is incomplete; retry the request.")
    return b"\n\ndata: " + body + b"\n\n"


def _lost_body(side: Side, url: str, failure: LegFailure, remedy: str) -> bytes:
    message = f"{side.value.capitalize()} instance {url} failed: {failure.detail}. {remedy}"
    return error_body(message, kind="upstream_error", code=f"{side.value}_{failure.kind.value}")

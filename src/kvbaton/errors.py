"""Every exception kvbaton raises. One tree; each class knows its remedy.

BatonError
├── UsageError               a flag, file or configuration value the user can mend
│   └── InvalidParams        kv_transfer_params with a missing, unknown or malformed field
├── DeploymentError          an engine or the router did not start, or died
├── Unsupported              this model, layout or build cannot be served; raised once, at start
├── Incompatible             the peer's layout or version differs; names both values
├── ProtocolError
│   ├── LocalProtocolError   our own code broke the protocol
│   └── RemoteProtocolError  the peer sent something it must not
├── TransportError
│   ├── PeerLost             the peer's process or link is gone
│   ├── PostFailed           an operation could not be posted, or ended in error
│   └── RegistrationFailed   memory could not be registered with the transport
├── Refused                  the peer answered no, and said why
├── LeaseExpired             the source's promise to hold blocks ran out
└── Cancelled                somebody gave the request up
"""

from __future__ import annotations

import enum


class Remedy(enum.Enum):
    """What the caller does about an error; connector and router obey it."""

    FIX_INPUT = "fix the input and try again"
    RECOMPUTE = "recompute the prompt on the decode engine"
    RETRY_ELSEWHERE = "retry with a new transfer id, on another instance if there is one"
    FAIL_REQUEST = "fail this request"
    FAIL_ENGINE = "fail this engine"


class BatonError(Exception):
    """Root of the tree. `remedy` says what the caller should do."""

    remedy = Remedy.FAIL_REQUEST


class UsageError(BatonError):
    remedy = Remedy.FIX_INPUT


class InvalidParams(UsageError):
    pass


class DeploymentError(BatonError):
    remedy = Remedy.FIX_INPUT


class Unsupported(BatonError):
    remedy = Remedy.FAIL_ENGINE


class Incompatible(BatonError):
    remedy = Remedy.FAIL_REQUEST


class ProtocolError(BatonError):
    pass


class LocalProtocolError(ProtocolError):
    remedy = Remedy.FAIL_ENGINE


class RemoteProtocolError(ProtocolError):
    remedy = Remedy.RECOMPUTE


class TransportError(BatonError):
    remedy = Remedy.RECOMPUTE


class PeerLost(TransportError):
    remedy = Remedy.RETRY_ELSEWHERE


class PostFailed(TransportError):
    pass


class RegistrationFailed(TransportError):
    remedy = Remedy.FAIL_ENGINE


class Refused(BatonError):
    remedy = Remedy.RECOMPUTE


class LeaseExpired(BatonError):
    remedy = Remedy.RECOMPUTE


class Cancelled(BatonError):
    remedy = Remedy.FAIL_REQUEST


def one_line(text: str, max_characters: int) -> str:
    """What somebody else wrote, fit for a line of a log or of an error: no control characters, not too long."""
    clean = "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text[:max_characters]
    )
    return clean if len(text) <= max_characters else clean[: max_characters - 3] + "..."

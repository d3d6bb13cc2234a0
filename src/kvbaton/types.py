"""Names for identifiers and the few enumerations every layer shares. Imports nothing of ours."""

from __future__ import annotations

import enum
from typing import NewType

EngineId = NewType("EngineId", str)
"""One vLLM engine; new at every start unless the operator pins it."""

TransferId = NewType("TransferId", str)
"""Moving one request's KV from P to D; new for every dispatch, also for a retry."""

RequestId = NewType("RequestId", str)
"""An engine's own id of a request, random suffix included. Never compared across engines."""

BlockId = NewType("BlockId", int)


class Direction(enum.Enum):
    """Which side posts the operation."""

    PUSH = "push"
    PULL = "pull"


class End(enum.Enum):
    """Which end of a transfer a machine stands for: the KV's source (P) or its destination (D)."""

    SOURCE = "source"
    DESTINATION = "destination"


class Outcome(enum.Enum):
    """How a transfer ended. Only DELIVERED may look like success."""

    DELIVERED = "delivered"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

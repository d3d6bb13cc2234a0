"""A mark in the device's stream after the step's forward, so that nothing is sent before it is computed.

Recorded on the engine's thread (microseconds), looked at by the driver's; nobody waits for it. Not yet run on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvbaton.errors import Unsupported

if TYPE_CHECKING:
    from kvbaton.runtime.events import Fence


def record_fence(device: torch.device) -> Fence | None:
    """None where a forward is over when the call returns. Raises Unsupported for a device without events."""
    if device.type == "cpu":
        return None
    module = getattr(torch, device.type, None)
    if module is None or not hasattr(module, "Event"):
        raise Unsupported(f"device {device.type} has no events; the end of a forward pass cannot be observed")
    fence: Fence = module.Event()
    fence.record(module.current_stream(device))  # type: ignore[attr-defined]  # Fence is the half the driver sees
    return fence

"""A second router in front of engines that already run."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from kvbaton.launch.supervisor import Deployment
from kvbaton.types import Direction


@contextlib.contextmanager
def second_router(deployment: Deployment, direction: Direction) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "kvbaton", "router", "--port", str(port), "--direction", direction.value]
    for instance in deployment.instances:
        command += ["--prefill" if instance.role == "prefill" else "--decode", instance.url]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_healthy(url, timeout_s=120)
            yield url
        finally:
            process.terminate()


def wait_healthy(url: str, *, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    reason = "not asked yet"
    while time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=10):
                return
        except (urllib.error.URLError, OSError) as error:
            reason = str(error)
            time.sleep(0.2)
    pytest.fail(f"{url} did not become healthy: {reason}")

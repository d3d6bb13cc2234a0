"""SIGSTOP: an engine that is slow or hung, but not dead. Requests end within their deadline; nothing wrong is written."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import pytest

from kvbaton.bench.soak_judge import Heard, Verdict, judge
from kvbaton.launch.supervisor import Instance
from tests.engines.conftest import Pair
from tests.engines.routing import wait_healthy
from tests.faults.asking import Expected, listen
from tests.faults.conftest import LONG, LONG_TOKENS, assert_twenty_succeed
from tests.faults.watching import Watch

pytestmark = [pytest.mark.engines, pytest.mark.faults, pytest.mark.timeout(900)]

CASES = [(victim, seconds) for seconds in (5, 20, 45) for victim in ("prefill", "decode")]
"""45 s is longer than the 30 s after which a silent peer is given up."""


def send(instance: Instance, number: signal.Signals) -> None:
    for pid in instance.pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@pytest.mark.parametrize(("victim", "seconds"), CASES)
def test_a_stopped_engine_delays_or_fails_requests_and_goes_on(
    pair: Pair, right: Expected, victim: str, seconds: int
) -> None:
    prompt = LONG[10 + CASES.index((victim, seconds))]
    stopped = {"prefill": pair.prefill, "decode": pair.decode}[victim]
    watch = Watch(pair.prefill)
    heard: list[Heard] = []
    asking = threading.Thread(
        target=lambda: heard.append(listen(pair.push_url, prompt, LONG_TOKENS, is_streaming=True, deadline_s=90))
    )
    asking.start()
    watch.wait_for("segment_moved")
    send(stopped, signal.SIGSTOP)
    try:
        time.sleep(seconds)  # the silence itself is what is tested
    finally:
        send(stopped, signal.SIGCONT)
    asking.join()

    verdict = judge(heard[0], right[prompt])
    assert verdict in (Verdict.RIGHT, Verdict.FAILED), heard[0]
    if seconds < 30:
        assert verdict is Verdict.RIGHT, f"shorter than any deadline, yet {heard[0]}"
    for url in (stopped.url, pair.push_url, pair.pull_url):
        wait_healthy(url, timeout_s=60)
    assert_twenty_succeed(pair, right)

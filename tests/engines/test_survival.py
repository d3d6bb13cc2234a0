"""Clients that leave and engines that die: nothing hangs, nothing leaks, the survivor serves on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
import urllib.parse

import pytest

from kvbaton.types import Direction
from tests.engines.asking import Answer, ask
from tests.engines.conftest import Pair, wait_until_empty
from tests.engines.prompts import PROMPTS, Prompt
from tests.engines.routing import wait_healthy

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1500)]

LONG = tuple(range(3, 253)) * 16
"""4,000 tokens: seconds of prefill, so there is time to leave."""


def leave_after(url: str, prompt: Prompt, seconds: float) -> None:
    """Sends a request, and closes the connection without reading the answer."""
    body = (
        '{"model": "tiny", "max_tokens": 200, "ignore_eos": true, "stream": true, "prompt": ' + str(list(prompt)) + "}"
    )
    address = urllib.parse.urlsplit(url)
    with socket.create_connection((address.hostname or "", address.port or 0)) as connection:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        connection.sendall(f"{head}\r\n\r\n{body}".encode())
        time.sleep(seconds)


@pytest.mark.parametrize("direction", list(Direction))
def test_clients_that_leave_free_both_sides(pair: Pair, expected: dict[Prompt, Answer], direction: Direction) -> None:
    """At any moment: while P computes, between the legs, while D decodes. Without waiting for a lease (30 s)."""
    wait_until_empty(pair, timeout_s=40)
    leavers = [
        threading.Thread(target=leave_after, args=(pair.url(direction), (salt, *LONG), seconds))
        for salt, seconds in enumerate((0.05, 0.3, 1.0, 2.5, 4.0), start=3)
    ]
    for leaver in leavers:
        leaver.start()
    for leaver in leavers:
        leaver.join()
    wait_until_empty(pair, timeout_s=25)
    assert ask(pair.url(direction), PROMPTS[7]).text == expected[PROMPTS[7]].text


def test_several_choices_with_one_ticket_load_once(pair: Pair, expected: dict[Prompt, Answer]) -> None:
    """A router that knows nothing of `n` sends it to the decode engine with the one ticket it has."""
    prompt = PROMPTS[8]
    prefilled = ask(pair.prefill.url, prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    ticket = json.loads(prefilled.body)["kv_transfer_params"]
    del ticket["remote_block_ids"]  # a push
    # vLLM wants sampling for several choices; among one candidate it is greedy all the same.
    answer = ask(pair.decode.url, prompt, n=3, temperature=1.0, top_k=1, kv_transfer_params=ticket)
    assert answer.status == 200, answer.body
    assert [choice["text"] for choice in json.loads(answer.body)["choices"]] == [expected[prompt].text] * 3
    wait_until_empty(pair, timeout_s=20)  # sooner than any lease ends


def test_a_killed_engine_fails_its_requests_and_can_come_back(pair: Pair, expected: dict[Prompt, Answer]) -> None:
    """kill -9 of P while D waits, then of D while P computes; each is started again, and nobody else has to be."""
    for victim in (pair.prefill, pair.decode):
        answers: list[Answer] = []
        asking = threading.Thread(target=lambda box=answers: box.append(ask(pair.push_url, LONG)))
        asking.start()
        time.sleep(0.5)
        for pid in victim.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        asking.join(timeout=60)
        assert answers, f"the request hung after {victim.name} was killed"
        assert answers[0].status in {502, 503, 504, 500}, answers[0].body
        pair.deployment.start(victim)
        wait_healthy(victim.url, timeout_s=240)
        wait_healthy(pair.push_url, timeout_s=60)
        for prompt in PROMPTS[8:12]:
            assert ask(pair.push_url, prompt).text == expected[prompt].text
    wait_until_empty(pair, timeout_s=60)

"""Mistakes at a running pair: each gets a clear answer at once, and the pair serves on."""

from __future__ import annotations

import json
import time

import pytest

from kvbaton.types import Direction
from tests.engines.asking import Answer, ask, post
from tests.engines.conftest import Pair, wait_until_empty
from tests.engines.prompts import PROMPTS, Prompt

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1500)]

GOOD = PROMPTS[5]


def assert_serves(pair: Pair, expected: dict[Prompt, Answer]) -> None:
    for direction in Direction:
        assert ask(pair.url(direction), GOOD).text == expected[GOOD].text
    wait_until_empty(pair, timeout_s=5)


def message_of(answer: Answer) -> str:
    return str(json.loads(answer.body)["error"]["message"])


@pytest.mark.parametrize("direction", list(Direction))
def test_prompt_longer_than_the_model_allows(pair: Pair, expected: dict[Prompt, Answer], direction: Direction) -> None:
    answer = ask(pair.url(direction), (7,) * 5000)
    assert answer.status == 400
    assert "4608" in message_of(answer)
    assert_serves(pair, expected)


def test_unknown_model(pair: Pair) -> None:
    answer = ask(pair.push_url, GOOD, model="tinny")
    assert answer.status == 404
    assert "tinny" in message_of(answer)


def test_wrong_type(pair: Pair, expected: dict[Prompt, Answer]) -> None:
    answer = ask(pair.push_url, GOOD, max_tokens="many")
    assert answer.status in {400, 422}
    assert "max_tokens" in answer.body
    assert_serves(pair, expected)


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "remote_engine_id": "x", "remote_host": "127.0.0.1", "remote_port": "many"},
        {"do_remote_prefill": True, "remote_engine_id": "x", "remote_host": "127.0.0.1", "remote_port": 70000},
        {"do_remote_prefill": True, "do_remote_decode": True},
    ],
)
def test_malformed_params_fail_their_request_alone(
    pair: Pair, expected: dict[Prompt, Answer], params: dict[str, object]
) -> None:
    started_s = time.monotonic()
    answer = ask(pair.decode.url, GOOD, kv_transfer_params=params)
    assert answer.status >= 400
    assert time.monotonic() - started_s < 10
    assert_serves(pair, expected)


def test_malformed_params_on_the_prefill_side_are_named_in_the_answer(pair: Pair) -> None:
    params: dict[str, object] = {"do_remote_decode": True, "transfer_id": 7}
    answer = ask(pair.prefill.url, GOOD, max_tokens=1, kv_transfer_params=params)
    assert "transfer_id" in json.loads(answer.body)["kv_transfer_params"]["error"]


def test_wrong_identity_is_refused_at_once(pair: Pair, expected: dict[Prompt, Answer]) -> None:
    """The address is P's, but the engine id is that of an earlier P: nobody waits for a timeout."""
    prefilled = ask(pair.prefill.url, GOOD, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    identity = json.loads(prefilled.body)["kv_transfer_params"]
    started_s = time.monotonic()
    stale = identity | {"remote_engine_id": "an-earlier-start", "remote_block_ids": None}
    answer = ask(pair.decode.url, PROMPTS[6], kv_transfer_params=stale)
    assert answer.status == 500
    assert time.monotonic() - started_s < 10
    # The good ticket still works, once.
    assert ask(pair.decode.url, GOOD, kv_transfer_params=identity).text == expected[GOOD].text
    assert_serves(pair, expected)


def test_nobody_at_the_address(pair: Pair, expected: dict[Prompt, Answer]) -> None:
    params: dict[str, object] = {
        "do_remote_prefill": True, "remote_engine_id": "x", "remote_host": "127.0.0.1", "remote_port": 9, "transfer_id": "t",
    }  # fmt: skip
    started_s = time.monotonic()
    answer = ask(pair.decode.url, GOOD, kv_transfer_params=params)
    assert answer.status == 500
    assert time.monotonic() - started_s < 15
    assert_serves(pair, expected)


def test_body_that_is_not_json(pair: Pair) -> None:
    answer = post(f"{pair.push_url}/v1/completions", {"model": "tiny"})
    assert answer.status == 400
    assert "prompt" in message_of(answer)

"""Answers that end at once, and several answers to one prompt."""

from __future__ import annotations

import json

import pytest

from kvbaton.types import Direction
from tests.engines.asking import ask, post
from tests.engines.conftest import Pair, wait_until_empty
from tests.faults.asking import Expected, listen
from tests.faults.conftest import SHORT

pytestmark = [pytest.mark.engines, pytest.mark.faults, pytest.mark.timeout(900)]

PROMPT = SHORT[-1]
THREE: dict[str, object] = {
    "model": "tiny",
    "prompt": list(PROMPT),
    "n": 3,
    "max_tokens": 8,
    "ignore_eos": True,
    "return_token_ids": True,
    # Only the likeliest token, as at temperature 0, where vLLM allows one choice only.
    "temperature": 1,
    "top_k": 1,
}


@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("direction", list(Direction))
def test_one_token(pair: Pair, right: Expected, direction: Direction, is_streaming: bool) -> None:
    heard = listen(pair.url(direction), PROMPT, 1, is_streaming=is_streaming)
    assert heard.tokens == right[PROMPT][:1]
    assert heard.is_whole
    wait_until_empty(pair, timeout_s=35)


@pytest.mark.parametrize("direction", list(Direction))
def test_a_stop_token_first_ends_the_answer_on_both_sides(pair: Pair, right: Expected, direction: Direction) -> None:
    """The prefill engine samples the same token; it must hand its KV over all the same."""
    answer = ask(pair.url(direction), PROMPT, stop_token_ids=[right[PROMPT][0]], return_token_ids=True)
    choice = json.loads(answer.body)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"] == list(right[PROMPT][:1])
    wait_until_empty(pair, timeout_s=35)


@pytest.mark.parametrize("direction", list(Direction))
def test_three_choices_through_the_router(pair: Pair, right: Expected, direction: Direction) -> None:
    answer = post(f"{pair.url(direction)}/v1/completions", THREE, timeout_s=60)
    assert answer.status == 200, answer.body
    choices = json.loads(answer.body)["choices"]
    assert [choice["token_ids"] for choice in choices] == [list(right[PROMPT][:8])] * 3
    wait_until_empty(pair, timeout_s=35)


def test_three_choices_with_one_ticket_at_the_engine(pair: Pair, right: Expected) -> None:
    """Routers that know nothing of `n` send it to the decode engine with the one ticket they have."""
    prefilled = ask(pair.prefill.url, PROMPT, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    ticket = json.loads(prefilled.body)["kv_transfer_params"]
    answer = post(f"{pair.decode.url}/v1/completions", THREE | {"kv_transfer_params": ticket}, timeout_s=60)
    assert answer.status == 200, answer.body
    choices = json.loads(answer.body)["choices"]
    assert [choice["token_ids"] for choice in choices] == [list(right[PROMPT][:8])] * 3
    wait_until_empty(pair, timeout_s=35)

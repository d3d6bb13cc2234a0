"""Through P and D, in both directions, every greedy token equals the aggregated engine's, and KV really moved."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from kvbaton.types import Direction
from tests.engines.asking import NUM_TOKENS, Answer, ask_all, metric
from tests.engines.conftest import Pair, wait_until_empty
from tests.engines.prompts import PROMPTS, Prompt

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1500)]


def events_of(trace_path: Path | None) -> list[dict[str, object]]:
    assert trace_path is not None
    return [json.loads(line) for line in trace_path.read_text().splitlines()]


def served(trace_path: Path | None) -> int:
    """Requests whose KV was handed over, or was all there already but for the last token."""
    events = events_of(trace_path)
    outcomes = Counter(event["outcome"] for event in events if event["event"] == "closed")
    return outcomes["delivered"] + sum(event["event"] == "nothing_needed" for event in events)


def assert_equal(answers: dict[Prompt, Answer], expected: dict[Prompt, Answer]) -> None:
    wrong = [len(prompt) for prompt in answers if answers[prompt].text != expected[prompt].text]
    assert not wrong, f"prompts of these lengths got other tokens than the aggregated engine gives: {wrong}"


@pytest.mark.parametrize("direction", [Direction.PUSH, Direction.PULL])
@pytest.mark.parametrize("num_at_once", [1, 6], ids=["one-by-one", "concurrent"])
def test_tokens_equal_and_kv_moved(
    pair: Pair, expected: dict[Prompt, Answer], direction: Direction, num_at_once: int
) -> None:
    """The first run is cold on both sides; the later ones find prefixes cached on both."""
    decode_url = pair.decode.url
    computed = metric(decode_url, "vllm:prompt_tokens_by_source_total", source="local_compute")
    generated = metric(decode_url, "vllm:generation_tokens_total")
    moved = served(pair.decode.trace_path)

    answers = ask_all(pair.url(direction), PROMPTS, num_at_once=num_at_once)

    assert_equal(answers, expected)
    assert served(pair.decode.trace_path) - moved == len(PROMPTS), "not every request's KV was handed over"
    newly_generated = metric(decode_url, "vllm:generation_tokens_total") - generated
    newly_computed = metric(decode_url, "vllm:prompt_tokens_by_source_total", source="local_compute") - computed
    assert newly_generated == len(PROMPTS) * NUM_TOKENS
    assert newly_computed <= len(PROMPTS), "the decode engine computed more of a prompt than its last token"


def test_directions_share_one_pair(pair: Pair, expected: dict[Prompt, Answer]) -> None:
    """Push and pull at the same time, for different prompts, in the same two engines."""
    halves = {Direction.PUSH: PROMPTS[8:24:2], Direction.PULL: PROMPTS[9:24:2]}
    for direction, prompts in halves.items():
        assert_equal(ask_all(pair.url(direction), prompts, num_at_once=4), expected)


def test_long_prompts_were_sent_in_segments(pair: Pair) -> None:
    """Chunks of a prompt were written while later ones computed; only the last one is on the critical path."""
    events = events_of(pair.prefill.trace_path)
    segments = Counter(event["transfer_id"] for event in events if event["event"] == "segment_posted")
    assert max(segments.values()) >= 4


def test_blocks_are_given_back(pair: Pair) -> None:
    wait_until_empty(pair, timeout_s=5)

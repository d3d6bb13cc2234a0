"""Token by token against one engine alone, with the soak's client and its judgement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from kvbaton.bench.soak_client import ask, body_of
from kvbaton.bench.soak_judge import Heard, Verdict, judge
from tests.engines.prompts import Prompt

Expected = Mapping[Prompt, tuple[int, ...]]
DEADLINE_S = 60.0
"""More than any promise: whoever needs longer hangs."""


def listen(
    url: str,
    prompt: Prompt,
    num_tokens: int,
    *,
    is_streaming: bool = False,
    deadline_s: float = DEADLINE_S,
    patience_s: float | None = None,
    max_tokens: int | None = None,
    **fields: object,
) -> Heard:
    body = body_of(prompt, num_tokens, "tiny", is_streaming) | fields
    return ask(url, body, deadline_s=deadline_s, patience_s=patience_s, max_tokens=max_tokens)


def verdicts(
    urls: Iterable[str], prompts: Iterable[Prompt], expected: Expected, num_tokens: int, *, num_at_once: int
) -> list[tuple[Verdict, Heard]]:
    """Every prompt at every URL."""
    asked = [(url, prompt) for url in urls for prompt in prompts]

    def one(case: tuple[str, Prompt]) -> tuple[Verdict, Heard]:
        url, prompt = case
        heard = listen(url, prompt, num_tokens)
        return judge(heard, expected[prompt][:num_tokens]), heard

    with ThreadPoolExecutor(num_at_once) as pool:
        return list(pool.map(one, asked))


def assert_all_right(found: list[tuple[Verdict, Heard]]) -> None:
    bad = [(verdict.value, heard) for verdict, heard in found if verdict is not Verdict.RIGHT]
    assert not bad, f"{len(bad)} of {len(found)}: {bad[:3]}"

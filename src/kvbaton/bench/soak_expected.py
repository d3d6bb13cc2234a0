"""The right tokens: what one engine answers that computes everything itself.

Invariant: a file of expected tokens is named by everything they depend on (model, prompts, numerics, vLLM), so one of an
earlier soak is used exactly when it says the same. Read `soak` for who compares.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

import msgspec

from kvbaton.bench.soak_client import ask, body_of
from kvbaton.bench.soak_judge import Heard
from kvbaton.bench.soak_plan import SoakPlan
from kvbaton.launch.remedy import deployment_error
from kvbaton.launch.supervisor import Deployment

_DEADLINE_S = 300.0
Tokens = dict[int, tuple[int, ...]]


def expected_path(folder: Path, plan: SoakPlan, identity: Mapping[str, str]) -> Path:
    """Where the expected tokens of `plan` are or will be. `identity`: what else they depend on."""
    told = msgspec.json.encode([sorted(identity.items()), plan.prompts, plan.max_output_tokens])
    return folder / f"expected-{hashlib.sha256(told).hexdigest()[:16]}.json"


def read_expected(path: Path) -> Tokens | None:
    """None when nobody has asked yet."""
    if not path.is_file():
        return None
    return dict(enumerate(msgspec.json.decode(path.read_bytes(), type=list[tuple[int, ...]])))


def write_expected(path: Path, tokens: Tokens) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".part")
    written.write_bytes(msgspec.json.encode([tokens[number] for number in range(len(tokens))]))
    written.replace(path)


def ask_expected(deployment: Deployment, plan: SoakPlan, num_at_once: int, show: Callable[[str], None]) -> Tokens:
    """The answer to every prompt. DeploymentError when one fails: without it nothing can be judged."""
    tokens: Tokens = {}

    def one(number: int) -> None:
        body = body_of(plan.prompts[number], plan.max_output_tokens[number], deployment.model_name, is_streaming=False)
        tokens[number] = _tokens_of(ask(deployment.router_url, body, deadline_s=_DEADLINE_S), number, plan)

    pool = ThreadPoolExecutor(num_at_once)
    asked = [pool.submit(one, number) for number in range(len(plan.prompts))]
    try:

        def over() -> bool:
            done, open_ = wait(asked, timeout=0, return_when=FIRST_EXCEPTION)
            show(f"{len(done)} of {len(asked)} expected answers")
            return not open_ or any(each.exception() for each in done)

        deployment.attend(over)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    for each in asked:
        if not each.cancelled():
            each.result()
    return tokens


def _tokens_of(heard: Heard, number: int, plan: SoakPlan) -> tuple[int, ...]:
    if len(heard.tokens) != plan.max_output_tokens[number]:
        raise deployment_error(
            f"one engine alone gave {len(heard.tokens)} of {plan.max_output_tokens[number]} tokens to prompt {number}: "
            f"status {heard.status}, {heard.fault or heard.broken or 'no error'}",
            "Read its log; nothing can be compared without its answers.",
        )
    return heard.tokens

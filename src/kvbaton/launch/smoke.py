"""One real completion through the router, and what the traces say about the KV it moved.

Invariant: a missing, empty or half-written trace is "unknown", never an error; a failed completion always is one.
"""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from kvbaton.launch.ready import Answer, ask
from kvbaton.launch.remedy import deployment_error
from kvbaton.launch.supervisor import Deployment

_TIMEOUT_S = 120.0
_TRACE_PATIENCE_S = 2.0
_MAX_TOKENS = 8
_PROMPT = (
    "A relay team runs four legs. The first runner carries the baton around the track, holds it out without slowing "
    "down, and lets go only when the next hand has closed around it. Nothing is dropped, nothing is carried twice. "
    "In one sentence, the secret of a good handover is"
)


class Moved(msgspec.Struct, frozen=True):
    """KV that travelled, summed over segments."""

    num_bytes: int
    move_s: float
    segments: int


class _Event(msgspec.Struct, frozen=True):
    """The fields of a trace line that matter here."""

    event: str
    num_bytes: int = 0
    move_s: float = 0.0
    outcome: str = ""
    reason: str = ""


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Completion(msgspec.Struct, frozen=True):
    usage: _Usage


def first_request(deployment: Deployment) -> str:
    """One line about a completion that went through the router. DeploymentError if it did not succeed."""
    started_s = time.monotonic()
    answer = _complete(deployment)
    elapsed_s = time.monotonic() - started_s
    traces = [path for instance in deployment.instances if (path := instance.trace_path)]
    if answer is None or not answer.ok:
        said = (
            "no answer" if answer is None else f"status {answer.status}: {answer.body[:300].decode(errors='replace')}"
        )
        raise deployment_error(
            f"the first request through {deployment.router_url} failed: {said}{_why_not(traces)}",
            f"Read {deployment.router.log_path} and the engines' logs beside it.",
        )
    return f"first request: {_tokens(answer)} in {elapsed_s:.2f} s{_kv_text(_patiently(traces))}"


def moved(traces: Iterable[Path]) -> Moved | None:
    """The sum of all `segment_moved` events; None when there are none."""
    found = [event for event in _events(traces) if event.event == "segment_moved"]
    if not found:
        return None
    return Moved(sum(each.num_bytes for each in found), sum(each.move_s for each in found), len(found))


def _why_not(traces: Iterable[Path]) -> str:
    """What the engines' own traces say of a transfer that did not deliver, or nothing."""
    closed = [event for event in _events(traces) if event.event == "closed" and event.reason]
    undelivered = [event.reason for event in closed if event.outcome != "delivered"]
    return f". The KV did not arrive: {undelivered[-1]}" if undelivered else ""


def _events(traces: Iterable[Path]) -> list[_Event]:
    decoder = msgspec.json.Decoder(_Event)
    found: list[_Event] = []
    for path in traces:
        for line in path.read_bytes().splitlines() if path.exists() else ():
            # The writer may be in the middle of the last line.
            with contextlib.suppress(msgspec.DecodeError):
                found.append(decoder.decode(line))
    return found


def _complete(deployment: Deployment) -> Answer | None:
    prompt = _PROMPT
    if deployment.spec.max_model_len:
        # A token is at least one character, so this fits whatever the tokenizer.
        prompt = prompt[: max(1, deployment.spec.max_model_len - _MAX_TOKENS)]
    body = {"model": deployment.model_name, "prompt": prompt, "max_tokens": _MAX_TOKENS, "temperature": 0}
    answers: list[Answer | None] = []
    router = deployment.router.plan

    def post() -> None:
        answers.append(ask(router.connect_host, router.port, "/v1/completions", dict(body), _TIMEOUT_S))

    # In a thread, so that a death or Ctrl-C meanwhile is noticed at once.
    thread = threading.Thread(target=post, daemon=True)
    thread.start()
    deployment.attend(lambda: not thread.is_alive())
    return answers[0]


def _patiently(traces: list[Path]) -> Moved | None:
    # The engines write their traces a little after the answer has left.
    give_up_at_s = time.monotonic() + (_TRACE_PATIENCE_S if traces else 0.0)
    while True:
        total = moved(traces)
        if total or time.monotonic() >= give_up_at_s:
            return total
        time.sleep(0.1)


def _kv_text(total: Moved | None) -> str:
    if total is None:
        return ""
    segments = "1 segment" if total.segments == 1 else f"{total.segments} segments"
    return f"; KV moved: {total.num_bytes / 1e6:.2f} MB in {total.move_s * 1e3:.1f} ms ({segments})"


def _tokens(answer: Answer) -> str:
    try:
        usage = msgspec.json.decode(answer.body, type=_Completion).usage
    except msgspec.DecodeError:
        return f"status {http.client.OK}"
    return f"{usage.prompt_tokens} tokens in, {usage.completion_tokens} out"

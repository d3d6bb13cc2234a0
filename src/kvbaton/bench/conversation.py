"""One question through a deployment's chat API, streamed, and the timeline of that very request.

Invariant: the answer is shown as it comes; traces are waited for a little, and a timeline with gaps is still one.
Read `client` for the stream and `timeline` for what is made of the traces.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from kvbaton.bench.client import Answer, Stream
from kvbaton.bench.timeline import Timeline, assemble, read_events, transfer_of
from kvbaton.launch.remedy import deployment_error
from kvbaton.launch.supervisor import Deployment

_TRACE_PATIENCE_S = 3.0


def ask(deployment: Deployment, text: str, max_tokens: int, out: TextIO) -> Answer:
    """The whole answer, already written to `out`. DeploymentError when the request failed."""
    stream = Stream(deployment.router_url)
    answers: list[Answer] = []
    body: dict[str, object] = {
        "model": deployment.model_name,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }

    def show(piece: str) -> None:
        # What a model without sense says may not be printable here.
        out.write(piece.encode(out.encoding or "utf-8", "replace").decode(out.encoding or "utf-8"))
        out.flush()

    def listen() -> None:
        answers.append(
            stream.ask(
                "/v1/chat/completions",
                body,
                expected_output_tokens=1,
                run_started_s=time.monotonic(),
                on_text=show,
            )
        )

    _in_thread(listen, stream.cut, deployment.attend)
    failure = answers[0].record.failure
    if failure is not None:
        raise deployment_error(
            f"the question through {deployment.router_url} was not answered: {failure}",
            f"Read {deployment.router.log_path} and the engines' logs beside it.",
        )
    return answers[0]


def timeline_of(deployment: Deployment, request_id: str | None) -> Timeline | None:
    """The way of one request, as far as the traces tell; None when they do not know it."""
    give_up_at_s = time.monotonic() + _TRACE_PATIENCE_S
    while True:
        found = _timeline_now(deployment, request_id)
        # Engines write their last events a little after the answer has left.
        if (found is not None and not found.missing) or time.monotonic() > give_up_at_s:
            return found
        time.sleep(0.1)


def _timeline_now(deployment: Deployment, request_id: str | None) -> Timeline | None:
    paths = [each.trace_path for each in (deployment.router, *deployment.instances)]
    events = read_events(line for path in paths if path for line in _lines(path))
    transfer_id = transfer_of(events, request_id) if request_id else None
    return assemble(events, transfer_id) if transfer_id else None


def _lines(path: Path) -> list[bytes]:
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes().splitlines()
    return []


def _in_thread(work: Callable[[], None], cut: Callable[[], None], attend: Callable[[Callable[[], bool]], None]) -> None:
    """`work` has ended; a death or Ctrl-C meanwhile is noticed at once and cuts it short."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        attend(lambda: not thread.is_alive())
    finally:
        while thread.is_alive():
            cut()
            thread.join(0.05)

"""Clients of a soak: each asks, listens, leaves early if it is one of those, and asks again when it was told to.

Invariant: every attempt ends by its deadline, whatever the server does; what was heard is in a record and nowhere else.
A thread per client: a soak has few at once. Read `soak_judge` for what records are worth.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from kvbaton.bench.soak_judge import Fault, Heard, Verdict, judge, reason
from kvbaton.bench.soak_plan import Leave, SoakPlan, SoakRequest
from kvbaton.bench.soak_report import Attempt
from kvbaton.types import Direction

_RETRY_AFTER_S = 1.0
_JOIN_S = 5.0


class _Choice(msgspec.Struct, frozen=True):
    token_ids: tuple[int, ...] | None = None


class _Piece(msgspec.Struct, frozen=True):
    """An answer, an error, or one event of a stream."""

    choices: tuple[_Choice, ...] = ()
    error: Fault | None = None


def ask(
    url: str,
    body: dict[str, object],
    *,
    deadline_s: float,
    patience_s: float | None = None,
    max_tokens: int | None = None,
) -> Heard:
    """What came of one request. The client leaves after `patience_s`, or when it has heard `max_tokens`."""
    listener = _Listener(url, deadline_s, patience_s, max_tokens)
    try:
        return listener.hear(body)
    finally:
        listener.close()


class _Listener:
    """One connection for one request."""

    def __init__(self, url: str, deadline_s: float, patience_s: float | None, max_tokens: int | None) -> None:
        parts = urlsplit(url)
        now_s = time.monotonic()
        self._give_up_at_s = now_s + deadline_s
        self._leave_at_s = now_s + patience_s if patience_s is not None else None
        self._max_tokens = max_tokens
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=deadline_s)
        self._sock: socket.socket | None = None
        self._tokens: list[int] = []
        self._status: int | None = None
        self._fault: Fault | None = None

    def hear(self, body: dict[str, object]) -> Heard:
        try:
            is_whole = self._exchange(body)
        except TimeoutError:
            has_left = self._leave_at_s is not None and self._leave_at_s < self._give_up_at_s
            return self._heard(has_left=has_left, is_late=not has_left)
        except (OSError, http.client.HTTPException, msgspec.MsgspecError) as failure:
            return self._heard(broken=type(failure).__name__)
        has_enough = self._max_tokens is not None and len(self._tokens) >= self._max_tokens
        return self._heard(is_whole=is_whole, has_left=has_enough and not is_whole)

    def close(self) -> None:
        self._connection.close()

    def _heard(
        self, *, is_whole: bool = False, has_left: bool = False, is_late: bool = False, broken: str | None = None
    ) -> Heard:
        return Heard(
            status=self._status,
            tokens=tuple(self._tokens),
            fault=self._fault,
            is_whole=is_whole,
            has_left=has_left,
            is_late=is_late,
            broken=broken,
        )

    def _exchange(self, body: dict[str, object]) -> bool:
        """Whether the body came to its proper end. TimeoutError when it is time to leave."""
        self._connection.connect()
        self._sock = self._connection.sock
        self._tick()
        payload = msgspec.json.encode(body)
        self._connection.request("POST", "/v1/completions", payload, {"Content-Type": "application/json"})
        self._tick()
        response = self._connection.getresponse()
        self._status = response.status
        if "text/event-stream" in (response.getheader("content-type") or ""):
            return self._stream(response)
        self._tick()
        self._piece(response.read())
        return True

    def _stream(self, response: http.client.HTTPResponse) -> bool:
        is_done = False
        while self._max_tokens is None or len(self._tokens) < self._max_tokens:
            self._tick()
            line = response.readline()
            if not line:
                return is_done
            if line.startswith(b"data:"):
                data = line.removeprefix(b"data:").strip()
                is_done = data == b"[DONE]"
                if not is_done:
                    self._piece(data)
        return False

    def _piece(self, data: bytes) -> None:
        piece = msgspec.json.decode(data, type=_Piece)
        self._fault = piece.error or self._fault
        for choice in piece.choices[:1]:
            self._tokens += choice.token_ids or ()

    def _tick(self) -> None:
        """The next wait ends in time."""
        limits_s = [self._give_up_at_s] + ([self._leave_at_s] if self._leave_at_s is not None else [])
        left_s = min(limits_s) - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        assert self._sock is not None, "connected before"
        self._sock.settimeout(left_s)


class Crowd:
    """All clients of a plan, `num_at_once` at a time, in the plan's order."""

    def __init__(
        self,
        plan: SoakPlan,
        expected: Mapping[int, tuple[int, ...]],
        urls: Mapping[Direction, str],
        model: str,
        *,
        num_at_once: int,
        deadline_s: float,
        patience_s: float,
    ) -> None:
        """`patience_s`: how long a client goes on asking after honest failures."""
        self._plan = plan
        self._expected = expected
        self._urls = urls
        self._model = model
        self._deadline_s = deadline_s
        self._patience_s = patience_s
        self._started_s = time.monotonic()
        self._next = iter(enumerate(plan.requests))
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.attempts: list[Attempt] = []
        self.num_ended = 0
        self._threads = [threading.Thread(target=self._client, daemon=True) for _ in range(num_at_once)]

    @property
    def now_s(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started_s

    @property
    def is_over(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    def start(self) -> None:
        self._started_s = time.monotonic()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """No request is begun any more; those on their way are given their deadline, at most."""
        self._stop.set()
        give_up_at_s = time.monotonic() + self._deadline_s + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, give_up_at_s - time.monotonic()))

    def _client(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                number, request = next(self._next, (-1, None))
            if request is None:
                return
            self._until_answered(number, request)
            with self._lock:
                self.num_ended += 1

    def _until_answered(self, number: int, request: SoakRequest) -> None:
        give_up_at_s = time.monotonic() + self._patience_s
        while not self._stop.is_set() and time.monotonic() < give_up_at_s:
            attempt = self._attempt(number, request)
            self.attempts.append(attempt)
            if attempt.verdict in (Verdict.RIGHT, Verdict.WRONG, Verdict.LEFT):
                return
            self._stop.wait(_RETRY_AFTER_S)

    def _attempt(self, number: int, request: SoakRequest) -> Attempt:
        sent_s = self.now_s
        heard = ask(
            self._urls[request.direction],
            body_of(self._plan.prompts[request.prompt], request.output_tokens, self._model, request.is_streaming),
            deadline_s=self._deadline_s,
            patience_s=request.patience_s if request.leave is Leave.AFTER_A_WHILE else None,
            max_tokens=request.patience_tokens if request.leave is Leave.AFTER_TOKENS else None,
        )
        expected = self._expected[request.prompt][: request.output_tokens]
        verdict = judge(heard, expected)
        is_answer = verdict in (Verdict.RIGHT, Verdict.LEFT)
        return Attempt(
            request=number,
            direction=request.direction.value,
            is_streaming=request.is_streaming,
            sent_s=round(sent_s, 4),
            ended_s=round(self.now_s, 4),
            verdict=verdict,
            status=heard.status,
            num_tokens=len(heard.tokens),
            reason=None if is_answer or verdict is Verdict.WRONG else reason(heard),
            message=heard.fault.message[:500] if heard.fault else None,
            tokens=heard.tokens if verdict is Verdict.WRONG else None,
        )


def body_of(prompt: tuple[int, ...], output_tokens: int, model: str, is_streaming: bool) -> dict[str, object]:
    """Greedy, with token ids in the answer: texts of different tokens may be equal."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": is_streaming,
        "return_token_ids": True,
    }

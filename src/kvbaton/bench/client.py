"""Sends requests and listens to their streams: one for the demo's question, many for its small load.

Invariant: requests leave when they are due, whether or not earlier ones were answered; whatever goes wrong with one is in
its record and nowhere else. A thread per request, so for tens of them: `load` drives the real load generator.
Read `workload` for what is sent and `records` for what is noted.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import urlsplit

import msgspec

from kvbaton.bench.records import RequestRecord
from kvbaton.bench.workload import PlannedRequest

_SILENCE_S = 120.0
"""A stream that says nothing for so long is given up."""
_MOMENT_S = 5.0


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: _Delta | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Piece(msgspec.Struct, frozen=True):
    """One event of a stream; completions and chat differ in where the text is."""

    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A stream, heard to its end."""

    record: RequestRecord
    request_id: str | None
    text: str


class Stream:
    """One streamed request to an OpenAI-compatible server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_SILENCE_S)

    def cut(self) -> None:
        """The thread that listens hears the end of the stream at once. May be called from any other."""
        # Closing alone would not wake a blocked read.
        if (sock := self._connection.sock) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def ask(
        self,
        path: str,
        body: dict[str, object],
        *,
        expected_output_tokens: int,
        run_started_s: float,
        on_text: Callable[[str], None] = lambda text: None,
    ) -> Answer:
        """The answer, with every failure noted in its record."""
        sent_s = time.monotonic()
        heard = _Heard(sent_s, on_text)
        request_id, error = None, None
        try:
            payload = msgspec.json.encode(body)
            self._connection.request("POST", path, payload, {"Content-Type": "application/json"})
            response = self._connection.getresponse()
            request_id = response.getheader("x-request-id")
            if response.status == http.client.OK:
                heard.all_of(response)
            else:
                error = f"status {response.status}: {response.read(300).decode(errors='replace')}"
        except (OSError, http.client.HTTPException, msgspec.DecodeError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        finally:
            self._connection.close()
        record = heard.record(sent_s - run_started_s, expected_output_tokens, error)
        return Answer(record=record, request_id=request_id, text="".join(heard.texts))


class _Heard:
    """What has come of a stream so far."""

    def __init__(self, sent_s: float, on_text: Callable[[str], None]) -> None:
        self._sent_s = sent_s
        self._on_text = on_text
        self.times_s: list[float] = []
        self.texts: list[str] = []
        self.usage = _Usage()
        self.error: str | None = None

    def record(self, sent_s: float, expected_output_tokens: int, error: str | None) -> RequestRecord:
        times_s = self.times_s
        return RequestRecord(
            sent_s=sent_s,
            ttft_s=times_s[0] if times_s else None,
            itls_s=tuple(after - before for before, after in itertools.pairwise(times_s)),
            latency_s=times_s[-1] if times_s else time.monotonic() - self._sent_s,
            input_tokens=self.usage.prompt_tokens,
            output_tokens=self.usage.completion_tokens,
            expected_output_tokens=expected_output_tokens,
            error=error or self.error,
        )

    def all_of(self, response: http.client.HTTPResponse) -> None:
        is_whole = False
        for data in _events(response):
            is_whole = data == b"[DONE]"
            if not is_whole:
                self._piece(msgspec.json.decode(data, type=_Piece))
        if not is_whole and self.error is None:
            self.error = "the stream was cut"

    def _piece(self, piece: _Piece) -> None:
        if piece.error is not None:
            self.error = bytes(piece.error).decode(errors="replace")
        if piece.usage is not None:
            self.usage = piece.usage
        for choice in piece.choices[:1]:
            self.times_s.append(time.monotonic() - self._sent_s)
            text = (choice.delta.content if choice.delta else choice.text) or ""
            self.texts.append(text)
            self._on_text(text)


def _events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The data of server-sent events. Comments and other fields are not for us."""
    while line := response.readline():
        if line.startswith(b"data:"):
            yield line.removeprefix(b"data:").strip()


def run_load(
    url: str,
    model: str,
    planned: Sequence[PlannedRequest],
    *,
    attend: Callable[[Callable[[], bool]], None],
    deadline_s: float,
    on_finished: Callable[[int], None] = lambda count: None,
) -> tuple[RequestRecord, ...]:
    """One record per planned request, in their order; after `deadline_s` what is still open is cut.

    `attend` waits until its argument is true; what it raises ends the load.
    """
    load = _Load(url, model, planned)
    give_up_at_s = time.monotonic() + deadline_s
    shown = 0

    def over() -> bool:
        nonlocal shown
        if load.num_finished > shown:
            shown = load.num_finished
            on_finished(shown)
        return shown == len(planned) or time.monotonic() > give_up_at_s

    try:
        load.start()
        attend(over)
    finally:
        load.end()
    return load.records()


class _Load:
    """Threads, a request each."""

    def __init__(self, url: str, model: str, planned: Sequence[PlannedRequest]) -> None:
        self._model = model
        self._planned = planned
        self._streams = [Stream(url) for _ in planned]
        self._records: dict[int, RequestRecord] = {}
        self._ended = threading.Event()
        self._started_s = time.monotonic()
        self._threads = [threading.Thread(target=self._one, args=(each,), daemon=True) for each in range(len(planned))]

    @property
    def num_finished(self) -> int:
        return len(self._records)

    def start(self) -> None:
        self._started_s = time.monotonic()
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """No request is on its way any more."""
        self._ended.set()
        give_up_at_s = time.monotonic() + _MOMENT_S
        for thread, stream in zip(self._threads, self._streams, strict=True):
            while thread.is_alive() and time.monotonic() < give_up_at_s:
                stream.cut()  # again and again: it may only be connecting just now
                thread.join(0.05)

    def records(self) -> tuple[RequestRecord, ...]:
        return tuple(self._records.get(index) or self._unsent(each) for index, each in enumerate(self._planned))

    def _one(self, index: int) -> None:
        planned = self._planned[index]
        if self._ended.wait(max(0.0, self._started_s + planned.due_s - time.monotonic())):
            return
        body: dict[str, object] = {
            "model": self._model,
            "prompt": planned.prompt_token_ids,
            "max_tokens": planned.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = self._streams[index].ask(
            "/v1/completions",
            body,
            expected_output_tokens=planned.output_tokens,
            run_started_s=self._started_s,
        )
        self._records[index] = answer.record

    def _unsent(self, planned: PlannedRequest) -> RequestRecord:
        return RequestRecord(
            sent_s=planned.due_s,
            ttft_s=None,
            itls_s=(),
            latency_s=0.0,
            input_tokens=len(planned.prompt_token_ids),
            output_tokens=0,
            expected_output_tokens=planned.output_tokens,
            error="not sent or not answered before the deadline",
        )

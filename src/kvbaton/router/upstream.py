"""One leg over HTTP: sends a body to an engine and hands back what came, or why nothing did.

Invariant: no aiohttp error leaves this file; a leg ends as an `Answer`, a `DecodeStream` or a `LegFailure`. Leaving a leg's
`async with`, or cancelling it, closes its connection unless the answer was read to its end, so the engine sees the client go.
D's bytes are neither decoded nor joined. Read next: `relay.py`.
"""

from __future__ import annotations

import asyncio
import io
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp
import msgspec

from kvbaton.router.answers import Answer, FailureKind, Headers, LegFailure
from kvbaton.router.request import Fields
from kvbaton.router.settings import RouterConfig

# Connection-level, or made anew by our own server. x-request-id is answered by us.
_NOT_PASSED_ON = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
        "upgrade", "content-length", "date", "server", "x-request-id",
    }
)  # fmt: skip
_KEEPALIVE_S = 3.0
"""Below the 5 s after which vLLM's server closes an idle connection, or a request could meet the closing."""
_LARGE_BODY_BYTES = 1 << 20

_LOST = (aiohttp.ClientError, OSError, TimeoutError)


class DecodeStream:
    """D's open SSE answer: its head, its first bytes, and a way to the rest."""

    def __init__(self, response: aiohttp.ClientResponse, first: bytes, idle_timeout_s: float) -> None:
        self.status = response.status
        self.headers = _passed_on(response)
        self.first = first
        self._response = response
        self._idle_timeout_s = idle_timeout_s

    async def next_chunk(self) -> bytes | LegFailure:
        """What came next, in whatever pieces; b"" at the end."""
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                return await self._response.content.readany()
        except _LOST as error:
            return _failure(error, f"it sent nothing for {self._idle_timeout_s:g} s")


class Upstream:
    """The pooled HTTP client. Owns one session from `start` to `close`."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._session: aiohttp.ClientSession | None = None

    def start(self) -> None:
        """Mutates; needs a running loop."""
        connector = aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=_KEEPALIVE_S)
        self._session = aiohttp.ClientSession(
            connector=connector,
            # Deadlines are set around each leg, where it is known what is waited for.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._config.connect_timeout_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity", "User-Agent": "kvbaton-router"},
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def prefill(self, url: str, path: str, body: bytes, headers: Mapping[str, str]) -> Answer | LegFailure:
        """P's whole answer."""
        return await self._whole("POST", url + path, body, headers, self._config.prefill_timeout_s)

    @asynccontextmanager
    async def decode(
        self, url: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[DecodeStream | Answer | LegFailure]:
        """D's answer once its first byte is here: a stream if it is one, else the whole."""
        response: aiohttp.ClientResponse | None = None
        limit_s = self._config.decode_timeout_s
        result: DecodeStream | Answer | LegFailure
        try:
            try:
                async with asyncio.timeout(limit_s):
                    response = await self._open("POST", url + path, body, headers)
                    result = await self._first_of(response)
            except _LOST as error:
                result = _failure(error, f"it began no answer within {limit_s:g} s")
            yield result
        finally:
            if response is not None:
                response.close()  # does nothing if the answer was read to its end

    async def models(self, url: str) -> Fields | LegFailure:
        """The engine's models by name, each entry as the engine wrote it."""
        answer = await self._whole("GET", url + "/v1/models", None, {}, self._config.probe_timeout_s)
        if isinstance(answer, LegFailure):
            return answer
        if not answer.is_ok:
            return LegFailure(FailureKind.NOT_READY, f"/v1/models answered {answer.status}")
        try:
            entries = msgspec.json.decode(answer.body, type=_ModelList).data
            return {msgspec.json.decode(entry, type=_Model).id: entry.copy() for entry in entries}
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return LegFailure(FailureKind.BAD_ANSWER, f"/v1/models is not a list of models ({error})")

    async def health(self, url: str) -> LegFailure | None:
        answer = await self._whole("GET", url + "/health", None, {}, self._config.probe_timeout_s)
        if isinstance(answer, LegFailure):
            return answer
        return None if answer.is_ok else LegFailure(FailureKind.NOT_READY, f"/health answered {answer.status}")

    async def _whole(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], limit_s: float
    ) -> Answer | LegFailure:
        response: aiohttp.ClientResponse | None = None
        try:
            async with asyncio.timeout(limit_s):
                response = await self._open(method, url, body, headers)
                return Answer(response.status, _passed_on(response), await response.read())
        except _LOST as error:
            return _failure(error, f"it did not answer within {limit_s:g} s")
        finally:
            if response is not None:
                response.close()

    async def _open(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        assert self._session is not None, "start() comes first"
        if body is None:
            return await self._session.request(method, url, headers=headers, allow_redirects=False)
        # aiohttp writes a long bytes object in one go and warns of it; from a file object it writes pieces.
        data = io.BytesIO(body) if len(body) >= _LARGE_BODY_BYTES else body
        typed = {**headers, "Content-Type": "application/json"}
        return await self._session.request(method, url, data=data, headers=typed, allow_redirects=False)

    async def _first_of(self, response: aiohttp.ClientResponse) -> DecodeStream | Answer | LegFailure:
        is_stream = response.content_type == "text/event-stream"
        if not (is_stream and 200 <= response.status < 300):
            answer = Answer(response.status, _passed_on(response), await response.read())
            return answer if answer.body or not answer.is_ok else _EMPTY
        first = await response.content.readany()
        return DecodeStream(response, first, self._config.idle_timeout_s) if first else _EMPTY


_EMPTY = LegFailure(FailureKind.BAD_ANSWER, "it answered 200 with an empty body")


class _Model(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[msgspec.Raw]


def _passed_on(response: aiohttp.ClientResponse) -> Headers:
    # A name listed in Connection is connection-level too; engines do not use that.
    return tuple(
        (name.lower(), value)
        for name, value in response.raw_headers
        if name.decode("latin-1").lower() not in _NOT_PASSED_ON
    )


def _failure(error: BaseException, late: str) -> LegFailure:
    """`error` in our words; `late` is what to say when our own deadline ended the leg."""
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return LegFailure(FailureKind.CONNECT_TIMEOUT, "no connection within the connect timeout")
    if isinstance(error, aiohttp.ClientConnectorError):
        return LegFailure(FailureKind.UNREACHABLE, f"no connection ({_reason(error.os_error)})")
    if isinstance(error, TimeoutError):
        return LegFailure(FailureKind.TIMEOUT, late)
    if isinstance(error, OSError | aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError):
        return LegFailure(FailureKind.BROKEN, "it closed the connection before its answer was complete")
    return LegFailure(FailureKind.BAD_ANSWER, f"its answer is not HTTP ({error})")


def _reason(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "its name does not resolve"
    return (error.strerror or str(error) or type(error).__name__).lower()

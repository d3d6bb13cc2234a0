"""The client's end of one request: a thin, typed face on ASGI's receive and send.

Invariant: one head, then bytes, then one end. Read next: `relay.py`.
"""

from __future__ import annotations

from starlette.types import Message, Receive, Scope, Send

from kvbaton.router.answers import Answer, Headers

PASSED_TO_ENGINES = ("authorization", "traceparent", "tracestate")
"""Of the client's headers, only these reach an engine; X-Request-Id and routing headers would steer it."""


class BodyTooLarge:
    """The client's body is longer than allowed."""


class ClientGone:
    """The client closed the connection before its body was complete."""


class Client:
    """One request's channel to its client."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.status: int | None = None
        """Of the head that was sent."""

    @property
    def engine_headers(self) -> dict[str, str]:
        return {name: self.headers[name] for name in PASSED_TO_ENGINES if name in self.headers}

    async def read_body(self, limit_bytes: int) -> bytes | BodyTooLarge | ClientGone:
        declared = self.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit_bytes:
            return BodyTooLarge()
        pieces: list[bytes] = []
        num_bytes = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return ClientGone()
            piece: bytes = message.get("body", b"")
            pieces.append(piece)
            num_bytes += len(piece)
            if num_bytes > limit_bytes:
                return BodyTooLarge()
            if not message.get("more_body", False):
                return b"".join(pieces)

    async def gone(self) -> None:
        """Returns when the client has closed the connection."""
        message: Message = {"type": ""}
        while message["type"] != "http.disconnect":
            message = await self._receive()

    async def send_answer(self, answer: Answer, request_id: str, *, is_last: bool = True) -> None:
        length = (b"content-length", str(len(answer.body)).encode())
        await self.send_head(answer.status, (*answer.headers, length), request_id)
        await self.send_chunk(answer.body, is_last=is_last)

    async def send_head(self, status: int, headers: Headers, request_id: str) -> None:
        self.status = status
        # The client's own id goes back to the client, and nowhere else.
        echoed = self.headers.get("x-request-id", request_id).encode("latin-1")
        head = [*headers, (b"x-request-id", echoed)]
        await self._send({"type": "http.response.start", "status": status, "headers": head})

    async def send_chunk(self, chunk: bytes, *, is_last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": not is_last})

"""The ASGI application: routes, checks before routing, and the request's hand-over to `relay.Exchange`.

Invariant: every error leaves in OpenAI's shape, and nothing reaches an engine before the request was found good and a
pair was found. Read next: `relay.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as HttpRoute
from starlette.types import Receive, Scope, Send

from kvbaton.router.answers import JSON_HEADERS, Answer, Side, error_body, rejection, unavailable
from kvbaton.router.client import BodyTooLarge, Client, ClientGone
from kvbaton.router.counters import Counters, RequestOutcome
from kvbaton.router.flow import Route
from kvbaton.router.legs import Ticket
from kvbaton.router.policy import Unavailable
from kvbaton.router.pool import Pool, new_ticket
from kvbaton.router.relay import Exchange, Job, Services
from kvbaton.router.request import Api, ClientRequest, DecodeOnly, parse_request
from kvbaton.router.settings import RouterConfig
from kvbaton.router.trace import Trace
from kvbaton.router.upstream import Upstream
from kvbaton.types import Direction


class Routed:
    """One routed endpoint, as an ASGI application."""

    def __init__(self, api: Api, config: RouterConfig, services: Services) -> None:
        self._api = api
        self._config = config
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = Client(scope, receive, send)
        ticket = new_ticket()
        request = await self._read(client)
        if request is None:
            return
        if isinstance(request, Answer):
            self._services.counters.rejected += 1
            await client.send_answer(request, ticket.request_id)
            return
        await self._route(request, client, ticket)

    async def _read(self, client: Client) -> ClientRequest | Answer | None:
        """The request, what to answer instead, or None when nobody is there to be answered."""
        if refusal := _check_content_type(client.headers.get("content-type")):
            return refusal
        body = await client.read_body(self._config.max_body_bytes)
        if isinstance(body, ClientGone):
            return None
        if isinstance(body, BodyTooLarge):
            limit_bytes = self._config.max_body_bytes
            answer = rejection(413, f"The request body exceeds {limit_bytes} bytes.", code="body_too_large")
            # The rest of the body would be read as the next request.
            return msgspec.structs.replace(answer, headers=(*answer.headers, (b"connection", b"close")))
        request = parse_request(self._api, body)
        return request if isinstance(request, Answer) else self._check_model(request)

    def _check_model(self, request: ClientRequest) -> ClientRequest | Answer:
        known = self._services.pool.known_models()
        if not known or request.model in known:
            return request  # nothing known: no engine has been up yet, which `_route` answers
        message = f"The model {request.model!r} does not exist. Served here: {', '.join(known)}."
        return rejection(404, message, code="model_not_found", param="model")

    async def _route(self, request: ClientRequest, client: Client, ticket: Ticket) -> None:
        """Exactly one outcome is counted."""
        services = self._services
        route = self._choose_route(request)
        services.counters.received += 1
        services.trace.event(
            "received",
            ticket.transfer_id,
            request_id=ticket.request_id,
            direction=route.value,
            path=self._api.value,
        )
        outcome = RequestOutcome.ABORTED
        try:
            outcome = await self._exchange(request, route, client, ticket)
        finally:
            services.counters.outcomes[outcome] += 1

    def _choose_route(self, request: ClientRequest) -> Route:
        reason = request.decode_only
        if not self._config.prefill_urls:
            reason = DecodeOnly.NO_PREFILL
        if reason is not None:
            self._services.counters.decode_only[reason] += 1
            return Route.DECODE_ONLY
        return Route.PUSH if self._config.direction is Direction.PUSH else Route.PULL

    async def _exchange(self, request: ClientRequest, route: Route, client: Client, ticket: Ticket) -> RequestOutcome:
        pool = self._services.pool
        pair = pool.choose(request.model, wants_prefill=route is not Route.DECODE_ONLY)
        if isinstance(pair, Unavailable):
            await client.send_answer(unavailable(pair.reason), ticket.request_id)
            self._services.trace.event(
                "finished",
                ticket.transfer_id,
                request_id=ticket.request_id,
                status=503,
                outcome=RequestOutcome.NOT_READY.value,
            )
            return RequestOutcome.NOT_READY
        prefill = None if pair.prefill is None else pool.prefills[pair.prefill]
        job = Job(request=request, route=route, prefill=prefill, decode=pool.decodes[pair.decode])
        return await Exchange(self._services, job, client, ticket).run()


class Reports:
    """The endpoints that tell of the router itself; none of them touches an engine."""

    def __init__(self, config: RouterConfig, services: Services) -> None:
        self._config = config
        self._services = services

    async def health(self, _: Request) -> Response:
        reason = self._services.pool.unready()
        status = {"status": "ok"} if reason is None else {"status": "unavailable", "reason": reason}
        return _json(200 if reason is None else 503, status)

    async def models(self, _: Request) -> Response:
        entries = self._services.pool.models()
        if not entries:
            return _response(unavailable(self._services.pool.unready() or "no decode instance serves a model"))
        return _json(200, {"object": "list", "data": list(entries.values())})

    async def status(self, _: Request) -> Response:
        pool = self._services.pool
        reason = pool.unready()
        return _json(
            200,
            {
                "ready": reason is None,
                "reason": reason,
                "direction": self._config.direction.value,
                "policy": self._config.policy.value,
                Side.PREFILL.value: [instance.as_json() for instance in pool.prefills.values()],
                Side.DECODE.value: [instance.as_json() for instance in pool.decodes.values()],
                **self._services.counters.as_json(),
            },
        )


def build_app(config: RouterConfig) -> Starlette:
    """The application; its lifespan opens and closes connections, probes and the trace file.

    Raises UsageError if the trace file cannot be opened.
    """
    upstream = Upstream(config)
    services = Services(Pool(config, upstream), upstream, Counters(), Trace(config.trace_path))
    reports = Reports(config, services)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        upstream.start()
        services.pool.start()
        try:
            yield
        finally:
            await services.pool.stop()
            await upstream.close()
            services.trace.close()

    return Starlette(
        routes=[
            *(HttpRoute(api.value, Routed(api, config, services), methods=["POST"]) for api in Api),
            HttpRoute("/v1/models", reports.models, methods=["GET"]),
            HttpRoute("/health", reports.health, methods=["GET"]),
            HttpRoute("/status", reports.status, methods=["GET"]),
        ],
        exception_handlers={HTTPException: _http_error, Exception: _defect},
        lifespan=lifespan,
    )


def _check_content_type(content_type: str | None) -> Answer | None:
    if content_type is None or content_type.partition(";")[0].strip().lower() == "application/json":
        return None
    message = f"The content type must be application/json, not {content_type!r}."
    return rejection(415, message, code="unsupported_media_type")


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405, in OpenAI's shape."""
    assert isinstance(error, HTTPException), "registered for it"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    answer = rejection(error.status_code, f"{error.detail}: {request.method} {request.url.path}", code=code)
    response = _response(answer)
    response.headers.update(error.headers or {})
    return response


async def _defect(_: Request, __: Exception) -> Response:
    """A defect of ours; Starlette raises it again after this, so it is logged with its traceback."""
    body = error_body("The router failed; its log has the details.", kind="internal_error", code="router_defect")
    return _response(Answer(500, JSON_HEADERS, body))


def _json(status: int, value: object) -> Response:
    return _response(Answer(status, JSON_HEADERS, msgspec.json.encode(value)))


def _response(answer: Answer) -> Response:
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in answer.headers}
    return Response(answer.body, status_code=answer.status, headers=headers)

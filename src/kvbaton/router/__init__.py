"""OpenAI-compatible router in front of prefill (P) and decode (D) engines.

May import `kvbaton.config`, `errors` and `types`, aiohttp, starlette and uvicorn; never the connector stack, so it
installs without a GPU. Start reading at `flow.py` (the life of one request as a table), then `relay.py`, which acts
on it.

```
settings   one frozen RouterConfig                 request   PURE  client's JSON -> ClientRequest, or a 4xx
policy     PURE  which P and which D               legs      PURE  what each engine is sent; reads P's answer
pool       instances, identities, health           flow      PURE  what next, on which event
upstream   aiohttp: one leg                        answers   PURE  error shapes
relay      one request: legs -> flow -> client     app       ASGI routes;  serve  the process;  trace  timeline
```
"""

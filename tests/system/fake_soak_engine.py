"""Stands for an engine in the soak's tests. The router in front of it is the real one.

Tokens are a function of the prompt, so every fake engine gives the same. What goes wrong is in the variable
FAKE_BEHAVIOUR, and only for engines with a connector: `wrong` tokens, `short` answers, `hang`, `leak` blocks, `die` at the
tenth request.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HEAD = "HTTP/1.1"


def tokens_of(prompt: list[int], count: int) -> list[int]:
    return [zlib.crc32(bytes(f"{prompt} {at}", "ascii")) % 250 for at in range(count)]


class Handler(BaseHTTPRequestHandler):
    protocol_version = HEAD
    behaviour = ""
    port = 0
    requests = 0

    def do_GET(self) -> None:
        usage = 0.5 if self.behaviour == "leak" else 0
        metrics = f'vllm:kv_cache_usage_perc{{engine="0"}} {usage}\nvllm:num_preemptions_total 3\n'
        self._answer({"data": [{"id": "fake-model"}]} if self.path != "/metrics" else metrics)

    def do_POST(self) -> None:
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/reset_prefix_cache":
            return self._answer({"success": self.behaviour != "leak"})
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            return self._answer({"choices": [], "kv_transfer_params": self._identity()})
        Handler.requests += 1
        if self.behaviour == "hang" and Handler.requests > 4:
            time.sleep(600)
        if self.behaviour == "die" and Handler.requests == 10:
            os._exit(3)
        tokens = tokens_of(body["prompt"], body["max_tokens"])
        if self.behaviour == "wrong" and Handler.requests % 5 == 0:
            tokens[-1] += 1
        if self.behaviour == "short" and Handler.requests % 5 == 0:
            tokens.pop()
        if body["stream"]:
            return self._stream(tokens)
        return self._answer({"choices": [{"token_ids": tokens}]})

    def _identity(self) -> dict[str, object]:
        names = {"remote_engine_id": f"engine-{os.getpid()}", "remote_host": "127.0.0.1", "remote_port": self.port}
        return {**names, "tp_size": 1, "pp_size": 1, "do_remote_prefill": True, "remote_block_ids": [[1]]}

    def _answer(self, content: object) -> None:
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, tokens: list[int]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for token in tokens:
            self._chunk(f"data: {json.dumps({'choices': [{'token_ids': [token]}]})}\n\n".encode())
            time.sleep(0.1 if self.behaviour == "slow" else 0.002)
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def log_message(self, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    allow_reuse_address = True
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that left is nothing to complain of."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--kv-transfer-config")
    flags, _ = parser.parse_known_args()
    Handler.behaviour = os.environ.get("FAKE_BEHAVIOUR", "") if flags.kv_transfer_config else ""
    Handler.port = flags.port
    Server((flags.host, flags.port), Handler).serve_forever()


if __name__ == "__main__":
    main()

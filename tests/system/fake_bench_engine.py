"""Stands for an engine, the router and the load generator in the benchmark's tests, each as its command line asks.

What an engine does is in the variable FAKE_BEHAVIOUR, by connector (`none` without one): `die` at start, `hang` or `crash`
at the sixth request (the first five are the warm-up), `cut` streams short from then on.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

WARM_UPS = 5


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    behaviour = ""
    requests = 0

    def do_GET(self) -> None:
        body = b'{"data": [{"id": "fake"}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Handler.requests += 1
        late = Handler.requests > WARM_UPS
        if late and self.behaviour == "hang":
            time.sleep(600)
        if late and self.behaviour == "crash":
            sys.stdout.write("RuntimeError: the fake engine crashed\n")
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        wanted = body["max_tokens"]
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        sent = 1 if late and self.behaviour == "cut" and wanted > 2 else wanted  # two are asked for to warm up
        for number in range(sent):
            text = f" {number}"
            self._event({"choices": [{"delta": {"content": text}} if "messages" in body else {"text": text}]})
            time.sleep(0.002)
        num_prompt = len(body.get("prompt") or body["messages"][0]["content"])
        self._event({"choices": [], "usage": {"prompt_tokens": num_prompt, "completion_tokens": sent}})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass

    def _event(self, data: object) -> None:
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")


class Forwarder(Handler):
    decode = ""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        connection = http.client.HTTPConnection(urlsplit(self.decode).netloc)
        connection.request("POST", self.path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        self.send_response(answer.status)
        self.send_header("Connection", "close")
        self.end_headers()
        while piece := answer.read1(65536):
            self.wfile.write(piece)
        self.close_connection = True


def generate(options: argparse.Namespace) -> None:
    """The results file of `vllm bench serve`, as far as it is read, of real requests."""
    started = []
    found: dict[str, list[object]] = {
        name: [] for name in ("input_lens", "output_lens", "ttfts", "itls", "latencies", "errors")
    }
    for _ in range(options.num_prompts):
        sent_s = time.monotonic()
        started.append(sent_s)
        connection = http.client.HTTPConnection(urlsplit(options.base_url).netloc)
        body = {"prompt": "a b", "max_tokens": options.random_output_len}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        data = connection.getresponse().read()
        took_s = time.monotonic() - sent_s
        tokens = data.count(b'"text"')
        found["input_lens"].append(options.random_input_len)
        found["output_lens"].append(tokens)
        found["ttfts"].append(took_s / 2)
        found["itls"].append([took_s / 2 / max(1, tokens - 1)] * (tokens - 1))
        found["latencies"].append(took_s)
        found["errors"].append("")
    found["start_times"] = list(started)
    (Path(options.result_dir) / options.result_filename).write_text(
        json.dumps(found | {"completed": options.num_prompts, "seed": options.seed})
    )


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int)
    parser.add_argument("--kv-transfer-config", default="{}")
    parser.add_argument("--decode", action="append")
    for name in ("--base-url", "--result-dir", "--result-filename"):
        parser.add_argument(name)
    for name in ("--num-prompts", "--random-input-len", "--random-output-len", "--seed"):
        parser.add_argument(name, type=int)
    options, _ = parser.parse_known_args()
    if options.base_url:
        generate(options)
        return
    if options.decode:
        Forwarder.decode = options.decode[0]
        ThreadingHTTPServer(("127.0.0.1", options.port), Forwarder).serve_forever()
    connector = json.loads(options.kv_transfer_config).get("kv_connector", "none")
    Handler.behaviour = json.loads(os.environ.get("FAKE_BEHAVIOUR", "{}")).get(connector, "")
    if Handler.behaviour == "die":
        sys.stdout.write("ValueError: the fake model does not fit\n")
        sys.exit(3)
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()

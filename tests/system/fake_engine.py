"""Stands for an engine or the router in the launcher's tests: answers what the launcher asks, and dies as told.

Unknown arguments are ignored, as the launcher passes vLLM's.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

WORKER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


class Handler(BaseHTTPRequestHandler):
    trace: str | None = None

    def do_GET(self) -> None:
        self._answer(200 if self.path in ("/health", "/v1/models") else 404, {"data": [{"id": "fake"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, {"usage": {"prompt_tokens": 60, "completion_tokens": 8}, "choices": [{"text": " fake"}]})

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, status: int, body: object) -> None:
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--kv-transfer-config", default="{}")
    parser.add_argument("--die-before-ready", type=int)
    parser.add_argument("--die-after-s", type=float)
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--plain-worker", action="store_true", help="a child that ignores SIGTERM")
    parser.add_argument("--worker", action="store_true", help="a child in its own session that ignores SIGTERM")
    options, _ = parser.parse_known_args()
    say("INFO Starting to load model")
    if options.plain_worker:
        subprocess.Popen([sys.executable, "-c", WORKER])
    if options.worker:
        subprocess.Popen([sys.executable, "-c", WORKER], start_new_session=True)
    if options.die_before_ready is not None:
        say("ValueError: the model does not fit")
        say("RuntimeError: Engine core initialization failed. See root cause above.")
        sys.exit(options.die_before_ready)
    if options.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.never_ready:
        time.sleep(600)
    if options.die_after_s is not None:
        threading.Timer(options.die_after_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    trace_path = json.loads(options.kv_transfer_config).get("kv_connector_extra_config", {}).get("trace_path")
    if trace_path and "prefill" in trace_path:
        event = {"who": "prefill", "event": "segment_moved", "segment": 0, "num_bytes": 2_000_000, "move_s": 0.004}
        Path(trace_path).write_text(json.dumps(event) + "\n" + '{"event": "segm')
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()

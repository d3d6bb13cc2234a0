"""Asking an OpenAI-compatible server, many questions at once."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tests.engines.prompts import Prompt

NUM_TOKENS = 12


@dataclass(frozen=True)
class Answer:
    status: int
    body: str

    @property
    def text(self) -> str:
        assert self.status == 200, self.body
        return str(json.loads(self.body)["choices"][0]["text"])


def ask(url: str, prompt: Prompt, *, timeout_s: float = 180, **fields: object) -> Answer:
    body = {"model": "tiny", "prompt": list(prompt), "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    return post(f"{url}/v1/completions", body | fields, timeout_s=timeout_s)


def post(url: str, body: dict[str, object], *, timeout_s: float = 180) -> Answer:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return Answer(response.status, response.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.read().decode())


def ask_all(url: str, prompts: Sequence[Prompt], *, num_at_once: int) -> dict[Prompt, Answer]:
    with ThreadPoolExecutor(num_at_once) as pool:
        return dict(zip(prompts, pool.map(lambda prompt: ask(url, prompt), prompts), strict=True))


def metric(engine_url: str, name: str, **labels: str) -> float:
    """The sum of a counter's samples whose labels match."""
    with urllib.request.urlopen(f"{engine_url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith((f"{name}{{", f"{name} ")) and all(label in line for label in wanted)
    )

"""The prompts of the parity test: token ids, so that their lengths are exact. Deterministic."""

from __future__ import annotations

import random

BLOCK = 32
"""Block size of the engines under test, in tokens."""

Prompt = tuple[int, ...]

_LENGTHS = [
    *[1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1],
    *[100, 127, 128, 129, 200, 255, 256, 257, 300, 333, 400, 448],
    *[511, 512, 513, 600, 640, 767, 768, 769, 900, 1000, 1023, 1024, 1025],
    *[1500, 2047, 2048, 2500, 4000],
]


def _fresh(rng: random.Random, num_tokens: int) -> Prompt:
    return tuple(rng.randrange(3, 256) for _ in range(num_tokens))


def _make() -> list[Prompt]:
    rng = random.Random(20261130)
    prompts = [_fresh(rng, length) for length in _LENGTHS]
    # Continuations of earlier prompts: both sides hold a prefix of them, of whole blocks and otherwise.
    bases = dict(zip(_LENGTHS, prompts, strict=True))
    prompts += [
        bases[base] + _fresh(rng, extra) for base, extra in ((256, 1), (256, 32), (257, 77), (512, 300), (1000, 31))
    ]
    return prompts


PROMPTS = _make()

"""The flags of `kvbaton demo` and `kvbaton bench`, with their help.

Invariant: imports next to nothing, so that `kvbaton --help` is instant. Read `demo` and `compare` for what they do.
"""

from __future__ import annotations

import argparse
import os

from kvbaton.bench.passage import QUESTION

DEMO_EXAMPLES = """\
examples:
  kvbaton demo                                   SmolLM2: an answer, its timeline, three ways of serving compared
  kvbaton demo --question "What happens when the baton is dropped?"
  kvbaton demo --model tiny --quick              a minute, answers without sense
"""
BENCH_EXAMPLES = """\
examples:
  kvbaton bench compare                          every mode once, SmolLM2
  kvbaton bench compare --model tiny --rate 1 --input-len 1000 --output-len 32 --iterations 3
  kvbaton bench compare --modes aggregated,kvbaton-push,nixl-pull-edited
"""
_MODES = "aggregated-1core,aggregated,kvbaton-push,kvbaton-pull,nixl-pull,nixl-pull-edited,nixl-push,nixl-push-edited"


def add_demo(parser: argparse.ArgumentParser) -> None:
    """What to ask which model, and where the files go."""
    _add_model(parser)
    parser.add_argument("--question", default=QUESTION, metavar="TEXT", help="about the relay race text it is given")
    parser.add_argument("--out", default="results/demo", metavar="DIR", help="where files go (results/demo)")
    parser.add_argument("--quick", action="store_true", help="short prompts and three requests")
    _add_state_dir(parser)


def add_bench(parser: argparse.ArgumentParser) -> None:
    """The one benchmark there is, its workload and its modes."""
    add = parser.add_argument
    add("action", choices=("compare",), help="the same workload through several ways of serving")
    _add_model(parser)
    add("--modes", default=_MODES, metavar="LIST", help=f"which, in this order ({_MODES.replace(',', ', ')})")
    add("--rate", type=float, default=0.2, metavar="N", help="requests per second, Poisson (0.2)")
    add("--num-prompts", type=int, default=20, metavar="N", help="requests per run (20)")
    add("--input-len", type=int, default=500, metavar="N", help="tokens per prompt (500)")
    add("--output-len", type=int, default=32, metavar="N", help="tokens per answer (32)")
    add("--iterations", type=int, default=1, metavar="N", help="runs per mode, interleaved: A B C A B C (1)")
    add("--deadline", type=float, default=240.0, metavar="S", help="longest run, warm-up included (240)")
    add("--startup-timeout", type=float, default=600.0, metavar="S", help="longest start of a mode (600)")
    add("--seed", type=int, default=1, metavar="N", help="of the first run; each has its own (1)")
    add("--cores", metavar="LIST", help="the prefill engine's core, then the decode engine's (the first two)")
    add("--dtype", help="of all engines (bfloat16 where the processor computes it, else float32)")
    add("--out", default="results/compare", metavar="DIR", help="where files go (results/compare)")
    _add_state_dir(parser)
    for hidden in ("--engine-command", "--router-command", "--bench-command"):
        add(hidden, action="append", help=argparse.SUPPRESS)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="prepared model, folder or hub id (smollm2)")


def _add_state_dir(parser: argparse.ArgumentParser) -> None:
    default = os.environ.get("KVBATON_STATE_DIR", ".kvbaton")
    parser.add_argument("--state-dir", default=default, metavar="DIR", help="logs and traces go here (.kvbaton)")

"""The flags of `kvbaton demo` and `kvbaton bench`, with their help.

Invariant: imports next to nothing, so that `kvbaton --help` is instant. Read `demo` and `compare` for what they do.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence

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
  kvbaton bench soak --requests 200              a quarter of an hour under fire
  kvbaton bench ACTION --help                    flags and examples of one
"""
SOAK_EXAMPLES = """\
examples:
  kvbaton bench soak                             2,000 requests, each engine killed twice
  kvbaton bench soak --requests 200 --kills 1 --seed 7
  kvbaton bench soak --mode nixl-push-edited --time-limit 900
"""
COMPARE_EXAMPLES = """\
examples:
  kvbaton bench compare                          every mode once, SmolLM2
  kvbaton bench compare --model tiny --rate 1 --input-len 1000 --output-len 32 --iterations 3
  kvbaton bench compare --modes aggregated,kvbaton-push,nixl-pull-edited
"""
TIMELINE_EXAMPLES = """\
examples:
  kvbaton timeline .kvbaton/traces/*.jsonl               the transfers in these files
  kvbaton timeline .kvbaton/traces/*.jsonl 7f3a          one of them, by the beginning of its id or by a request's
"""
_MODES = "aggregated-1core,aggregated,kvbaton-push,kvbaton-pull,nixl-pull,nixl-pull-edited,nixl-push,nixl-push-edited"
_SOAK_MODES = ("kvbaton", "nixl-pull", "nixl-pull-edited", "nixl-push", "nixl-push-edited")


def add_demo(parser: argparse.ArgumentParser) -> None:
    """What to ask which model, and where the files go."""
    _add_model(parser)
    parser.add_argument("--question", default=QUESTION, metavar="TEXT", help="about the relay race text it is given")
    parser.add_argument("--out", default="results/demo", metavar="DIR", help="where files go (results/demo)")
    parser.add_argument("--quick", action="store_true", help="short prompts and three requests")
    _add_state_dir(parser)


def add_bench(parser: argparse.ArgumentParser) -> None:
    """One command for each kind of measurement."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions")
    for name, about, examples, add in (
        ("compare", "The same workload through several ways of serving.", COMPARE_EXAMPLES, _add_compare),
        (
            "soak",
            "Many requests, clients that leave, engines that are killed: every token compared.",
            SOAK_EXAMPLES,
            _add_soak,
        ),
    ):
        action = actions.add_parser(name, help=about, description=about, epilog=examples)
        add(action)
        action.set_defaults(command_parser=action)


def _add_compare(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_model(parser)
    add("--modes", default=_MODES, metavar="LIST", help=f"which, in this order ({_MODES.replace(',', ', ')})")
    add("--rate", type=float, default=0.2, metavar="N", help="requests per second, Poisson (0.2)")
    add("--num-prompts", type=int, default=20, metavar="N", help="requests per run (20)")
    add("--input-len", type=int, default=500, metavar="N", help="tokens per prompt (500)")
    add("--output-len", type=int, default=32, metavar="N", help="tokens per answer (32)")
    add("--iterations", type=int, default=1, metavar="N", help="runs per mode, interleaved: A B C A B C (1)")
    add("--deadline", type=float, default=240.0, metavar="S", help="longest run, warm-up included (240)")
    add("--seed", type=int, default=1, metavar="N", help="of the first run; each has its own (1)")
    add("--dtype", help="of all engines (bfloat16 where the processor computes it, else float32)")
    add("--out", default="results/compare", metavar="DIR", help="where files go (results/compare)")
    _add_engines(parser)
    add("--bench-command", action="append", help=argparse.SUPPRESS)


def _add_soak(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_model(parser, default="tiny")
    add("--mode", choices=_SOAK_MODES, default=_SOAK_MODES[0], help="which connector (kvbaton, push and pull)")
    add("--requests", type=int, default=2000, metavar="N", help="how many clients (2000)")
    add("--concurrency", type=int, default=8, metavar="N", help="how many of them at once (8)")
    add("--cancel-share", type=float, default=0.1, metavar="X", help="share of clients that leave early (0.1)")
    add("--kills", type=int, default=2, metavar="N", help="how often each engine is killed and started again (2)")
    add("--deadline", type=float, default=60.0, metavar="S", help="an attempt without an end by then hangs (60)")
    add("--patience", type=float, default=240.0, metavar="S", help="how long a client asks again after failures (240)")
    add("--time-limit", type=float, default=3600.0, metavar="S", help="longest load (3600)")
    add("--seed", type=int, default=1, metavar="N", help="of prompts, clients and kills (1)")
    add("--out", default="results/soak", metavar="DIR", help="where files go (results/soak)")
    _add_engines(parser)


def _add_engines(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--startup-timeout", type=float, default=600.0, metavar="S", help="longest start of an engine (600)")
    add("--cores", metavar="LIST", help="the prefill engine's core, then the decode engine's (the first two)")
    _add_state_dir(parser)
    for hidden in ("--engine-command", "--router-command"):
        add(hidden, action="append", help=argparse.SUPPRESS)


def words_of(texts: Sequence[str] | None) -> tuple[str, ...] | None:
    """A command of shell words, given in one flag or several; None when there is none."""
    return tuple(word for text in texts or () for word in shlex.split(text)) or None


def add_timeline(parser: argparse.ArgumentParser) -> None:
    """Files, then perhaps a transfer."""
    about = "timelines of engines and router; a last one that is no file names the transfer"
    parser.add_argument("what", nargs="+", metavar="FILE", help=about)


def _add_model(parser: argparse.ArgumentParser, default: str = "smollm2") -> None:
    parser.add_argument("--model", default=default, help=f"prepared model, folder or hub id ({default})")


def _add_state_dir(parser: argparse.ArgumentParser) -> None:
    default = os.environ.get("KVBATON_STATE_DIR", ".kvbaton")
    parser.add_argument("--state-dir", default=default, metavar="DIR", help="logs and traces go here (.kvbaton)")

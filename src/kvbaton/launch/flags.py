"""The flags of `kvbaton up`, `down`, `status` and `logs`, with their help.

Invariant: imports nothing but argparse, so that `kvbaton --help` is instant. Read `arguments` for what becomes of them.
"""

from __future__ import annotations

import argparse
import os

UP_EXAMPLES = """\
examples:
  kvbaton up                                     one prefill and one decode engine, SmolLM2, and a router
  kvbaton up tiny --prefill 2 --mode pull        two prefill engines; decode reads the KV
  kvbaton up tiny --connector none               the aggregated baseline: one engine does both
  kvbaton up Qwen/Qwen3-0.6B --tp 2 --engine-args "--max-num-seqs 64" --dry-run
  kvbaton up --detach && kvbaton status && kvbaton down
"""
DOWN_EXAMPLES = """\
examples:
  kvbaton down
  kvbaton down --name second
  kvbaton down --all
"""
STATUS_EXAMPLES = """\
examples:
  kvbaton status
  kvbaton status --json | jq '.[0].router_url'
"""
LOGS_EXAMPLES = """\
examples:
  kvbaton logs                    the end of every log
  kvbaton logs decode -f          follow the decode engines
  kvbaton logs prefill-0 -n 200
"""

_PASSED_ON = (
    "--engine-args",
    "--prefill-args",
    "--decode-args",
    "--router-args",
    "--engine-command",
    "--router-command",
)


def join_passed_on(arguments: list[str]) -> list[str]:
    """`--engine-args --seed` as `--engine-args=--seed`: what follows is a value, though it looks like a flag."""
    joined: list[str] = []
    words = iter(arguments)
    for word in words:
        value = next(words, None) if word in _PASSED_ON else None
        joined.append(word if value is None else f"{word}={value}")
    return joined


def add_up(parser: argparse.ArgumentParser) -> None:
    """What to deploy, where, and how engines are set up."""
    parser.add_argument(
        "model", nargs="?", default="smollm2", metavar="MODEL", help="prepared model, folder or hub id (smollm2)"
    )
    _add_name(parser)
    _add_what(parser)
    _add_run(parser)
    _add_placement(parser)
    _add_engine(parser)
    for hidden in ("--engine-command", "--router-command"):
        parser.add_argument(hidden, action="append", help=argparse.SUPPRESS)


def add_down(parser: argparse.ArgumentParser) -> None:
    _add_name(parser)
    parser.add_argument("--all", action="store_true", help="stop every deployment")


def add_status(parser: argparse.ArgumentParser) -> None:
    _add_state_dir(parser)
    parser.add_argument("--json", action="store_true", help="for programs")


def add_logs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("role", nargs="?", metavar="ROLE", help="prefill, decode, router, or one, as in decode-0")
    _add_name(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on as lines are written")
    parser.add_argument("-n", "--lines", type=int, default=20, metavar="N", help="lines of each log (20)")


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", default="default", help="name of the deployment (default)")
    _add_state_dir(parser)


def _add_state_dir(parser: argparse.ArgumentParser) -> None:
    default = os.environ.get("KVBATON_STATE_DIR", ".kvbaton")
    parser.add_argument("--state-dir", default=default, metavar="DIR", help="where deployments are recorded (.kvbaton)")


def _add_what(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what")
    group.add_argument("--prefill", type=int, metavar="N", help="prefill engines (1)")
    group.add_argument("--decode", type=int, default=1, metavar="N", help="decode engines (1)")
    group.add_argument(
        "--mode", choices=("push", "pull"), default="push", help="prefill writes the KV, or decode reads it (push)"
    )
    group.add_argument(
        "--connector",
        choices=("baton", "nixl-pull", "nixl-push", "none"),
        default="baton",
        help="ours, one of vLLM's own, or none: engines that do both (baton)",
    )
    group.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks per engine (1)")
    group.add_argument("--prefill-tp", type=int, metavar="N", help="of prefill engines, where they differ")
    group.add_argument("--decode-tp", type=int, metavar="N", help="of decode engines, where they differ")
    group.add_argument("--prefill-pp", type=int, default=1, metavar="N", help="pipeline stages per prefill engine (1)")
    group.add_argument(
        "--kv-load-failure-policy",
        choices=("fail", "recompute"),
        default="fail",
        help="when KV does not arrive: fail the request, or compute the prompt again (fail)",
    )
    group.add_argument("--connector-config", metavar="JSON", help="further connector settings")


def _add_run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("running")
    group.add_argument("--dry-run", action="store_true", help="print the commands and start nothing")
    group.add_argument("--detach", action="store_true", help="return once it serves; stop it with `kvbaton down`")
    group.add_argument("--no-smoke", action="store_true", help="send no first request")
    group.add_argument("--no-trace", action="store_true", help="write no traces")
    group.add_argument("--log-dir", metavar="DIR", help="logs go here (logs/ beside the state file)")
    group.add_argument(
        "--startup-timeout", type=float, default=600.0, metavar="S", help="give up when not ready after (600)"
    )


def _add_placement(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("placement")
    group.add_argument("--device", choices=("auto", "cpu", "cuda", "rocm"), default="auto", help="(what is found)")
    group.add_argument("--share-gpus", action="store_true", help="several engines on one GPU")
    group.add_argument("--cores", metavar="LIST", help="cores to split among the engines, as in 0-3 (all)")
    group.add_argument("--prefill-cores", metavar="LIST", help="cores of the prefill engines")
    group.add_argument("--decode-cores", metavar="LIST", help="cores of the decode engines")
    group.add_argument("--no-pin", action="store_true", help="let every engine use all cores")
    group.add_argument("--host", default="127.0.0.1", help="address the router listens on (127.0.0.1)")
    group.add_argument("--engine-host", default="127.0.0.1", metavar="HOST", help="the engines' (127.0.0.1)")
    group.add_argument("--port", type=int, help="port of the router; 0 for a free one (8000, or free)")
    group.add_argument("--prefill-ports", metavar="LIST", help="one per prefill engine (free ones)")
    group.add_argument("--decode-ports", metavar="LIST", help="one per decode engine (free ones)")
    group.add_argument(
        "--side-channel-host", default="127.0.0.1", metavar="HOST", help="where engines meet (127.0.0.1)"
    )
    group.add_argument("--side-channel-ports", metavar="LIST", help="one per engine, prefill first (free ones)")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engines")
    group.add_argument("--served-model-name", metavar="NAME", help="what clients ask for (the model's own name)")
    group.add_argument("--kv-cache-gib", type=float, metavar="GIB", help="KV cache of each engine (1 on a CPU)")
    group.add_argument("--block-size", type=int, metavar="N", help="tokens per block (32 on a CPU)")
    group.add_argument("--max-model-len", type=int, metavar="N", help="longest request in tokens")
    group.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="tokens of one step")
    group.add_argument("--dtype", help="(bfloat16 on a CPU)")
    group.add_argument("--executor", choices=("uni", "mp"), help="engine and worker in one process, or not")
    group.add_argument("--env", action="append", metavar="NAME=VALUE", help="environment of the engines; repeatable")
    for whom in ("engine", "prefill", "decode", "router"):
        text = f"more arguments for {whom}{'' if whom == 'router' else ' engines' if whom != 'engine' else 's'}, quoted"
        group.add_argument(f"--{whom}-args", action="append", metavar="'ARGS'", help=text)

"""The `kvbaton` command line: argument parsing only.

Invariant: a command is one call into a package, imported when it is run, so that help is instant and each command needs
only its own extra. No user mistake shows a traceback. Exit codes: 0 done, 1 it failed, 2 it was asked for wrongly.
Read the package of the command next: `launch.up`, `launch.operate`, `router.serve`.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from kvbaton.bench import flags as bench_flags
from kvbaton.errors import BatonError, UsageError
from kvbaton.launch import flags

_PROGRAM = "kvbaton"
_INTERRUPTED = 130
"""As shells have it, for commands that Ctrl-C cuts short; `up` and `logs -f` are meant to be ended by it."""
_EXTRAS = {
    "psutil": "launch",
    "rich": "launch",
    "aiohttp": "router",
    "starlette": "router",
    "uvicorn": "router",
    "gguf": "models",
    "accelerate": "models",
    "transformers": "models",
    "matplotlib": "bench",
}

_ABOUT = "Disaggregated LLM serving with vLLM: prefill on one engine, decode on another, KV handed over in between."
_EXAMPLES = """\
examples:
  kvbaton models prepare smollm2     a small real model, ready for any machine
  kvbaton up smollm2                 one prefill engine, one decode engine and a router
  kvbaton COMMAND --help             flags and examples of a command
"""
_ROUTER_EXAMPLES = """\
examples:
  kvbaton router --prefill http://10.0.0.1:8100 --decode http://10.0.0.2:8200 --direction push
  kvbaton router --decode http://127.0.0.1:8200          plain routing, no transfers
"""
_MODELS_EXAMPLES = """\
examples:
  kvbaton models list
  kvbaton models prepare tiny
"""
_KEY_EXAMPLES = """\
examples:
  kvbaton key new /etc/kvbaton/cluster.key
  then, for every engine: its own copy, and "cluster_key_file": "/etc/kvbaton/cluster.key" in kv_connector_extra_config
"""
_DOCTOR_EXAMPLES = """\
examples:
  kvbaton doctor
  kvbaton doctor --json
"""
_ROUTER_FIELDS = (
    "prefill_urls",
    "decode_urls",
    "direction",
    "policy",
    "host",
    "port",
    "trace_path",
    "connect_timeout_s",
    "prefill_timeout_s",
    "decode_timeout_s",
    "idle_timeout_s",
    "max_body_bytes",
    "drain_s",
    "log_level",
)

Handler = Callable[[argparse.Namespace, list[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the result is the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parse(arguments)
    handler: Handler = options.handler
    try:
        return handler(options, arguments)
    except BatonError as error:
        return _complain(str(error), getattr(error, "__notes__", None) or [error.remedy.value], error)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        message = f"`{_PROGRAM} {options.command}` needs {error.name!r}, which is not installed"
        return _complain(message, [f"pip install 'kvbaton[{extra}]'"], error)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has enough; keep the interpreter from complaining when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


class _Parser(argparse.ArgumentParser):
    """Argparse, with a suggestion for what was probably meant."""

    def __init__(self, **settings: object) -> None:
        settings |= {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(**settings)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{_PROGRAM}: error: {message}\n  remedy: `{self.prog} --help` lists what there is\n")
        sys.exit(2)

    def known(self, value: str) -> list[str]:
        """Flags, or commands, close to `value`."""
        names = [name for action in self._actions for name in action.option_strings]
        for action in self._actions:
            names += [str(choice) for choice in action.choices or ()]
        return difflib.get_close_matches(value.partition("=")[0], names, n=2)

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            close = difflib.get_close_matches(str(value), choices, n=2)
            hint = _did_you_mean(close) or f"one of: {', '.join(choices)}"
            what = "command" if isinstance(action.choices, dict) else "/".join(action.option_strings) or action.dest
            self.error(f"{what}: {str(value)!r} is unknown. {hint}")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser, commands = _parsers()
    options, unknown = parser.parse_known_args(flags.join_passed_on(arguments))
    if unknown:
        command = getattr(options, "command_parser", None) or commands.get(options.command, parser)
        hint = _did_you_mean(command.known(unknown[0]))
        command.error(f"{unknown[0]} is not known to `{command.prog}`. {hint}".rstrip())
    if options.command is None:
        parser.print_help()
        sys.exit(2)
    return options


def _parsers() -> tuple[_Parser, dict[str, _Parser]]:
    parser = _Parser(prog=_PROGRAM, description=_ABOUT, epilog=_EXAMPLES)
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser, title="commands")
    made: dict[str, _Parser] = {}
    for name, (summary, examples, add, handler) in _COMMANDS.items():
        made[name] = commands.add_parser(name, help=summary, description=summary, epilog=examples)
        add(made[name])
        made[name].set_defaults(handler=handler)
    return parser, made


class _Version(argparse.Action):
    def __call__(self, *unused: object, **also_unused: object) -> None:
        from importlib.metadata import version  # noqa: PLC0415 - slow, and rarely wanted

        sys.stdout.write(f"{_PROGRAM} {version(_PROGRAM)}\n")
        sys.exit(0)


def _up(options: argparse.Namespace, arguments: list[str]) -> int:
    from kvbaton.launch.up import main as up  # noqa: PLC0415

    return up(options, arguments, sys.stdout)


def _down(options: argparse.Namespace, _: list[str]) -> int:
    from kvbaton.launch.operate import down  # noqa: PLC0415

    return down(Path(options.state_dir), None if options.all else options.name, sys.stdout)


def _status(options: argparse.Namespace, _: list[str]) -> int:
    from kvbaton.launch.operate import status  # noqa: PLC0415

    return status(Path(options.state_dir), sys.stdout, as_json=options.json)


def _logs(options: argparse.Namespace, _: list[str]) -> int:
    from kvbaton.launch.operate import logs  # noqa: PLC0415

    where = (Path(options.state_dir), options.name, options.role)
    try:
        return logs(*where, sys.stdout, count=options.lines, follow=options.follow)
    except KeyboardInterrupt:
        return 0


def _router(options: argparse.Namespace, _: list[str]) -> int:
    from kvbaton.config import decode_config  # noqa: PLC0415
    from kvbaton.router.serve import serve  # noqa: PLC0415
    from kvbaton.router.settings import RouterConfig  # noqa: PLC0415

    given = {key: value for key in _ROUTER_FIELDS if (value := getattr(options, key)) is not None}
    serve(decode_config(given, RouterConfig, what="router"))
    return 0


def _models(options: argparse.Namespace, _: list[str]) -> int:
    from kvbaton.launch import models  # noqa: PLC0415

    if options.action == "list":
        return models.list_models(options.models_dir)
    if options.model is None:
        raise UsageError("models prepare: which model? `kvbaton models list` shows what can be prepared")
    models.prepare(options.model, options.models_dir, options.force)
    return 0


def _doctor(options: argparse.Namespace, _: list[str]) -> int:
    from kvbaton.launch import doctor  # noqa: PLC0415

    return int(doctor.main(json_output=options.json) or 0)


def _key(options: argparse.Namespace, _: list[str]) -> int:
    from kvbaton.cluster_key import make_key_file  # noqa: PLC0415

    make_key_file(options.path)
    sys.stdout.write(
        f"{options.path}: a new key, readable by you only. Give every engine of the cluster the same one.\n"
    )
    return 0


def _demo(options: argparse.Namespace, arguments: list[str]) -> int:
    from kvbaton.bench.demo import main as demo  # noqa: PLC0415

    return demo(options, arguments, sys.stdout)


def _bench(options: argparse.Namespace, arguments: list[str]) -> int:
    if options.action == "soak":
        from kvbaton.bench.soak import main as soak  # noqa: PLC0415

        return soak(options, arguments, sys.stdout)
    from kvbaton.bench.compare import main as compare  # noqa: PLC0415

    return compare(options, arguments, sys.stdout)


def _timeline(options: argparse.Namespace, _: list[str]) -> int:
    from kvbaton.bench.story import main as tell  # noqa: PLC0415

    return tell(options.what, sys.stdout)


def _add_router(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prefill", dest="prefill_urls", action="append", metavar="URL", help="a prefill engine; repeatable")
    add(
        "--decode",
        dest="decode_urls",
        action="append",
        metavar="URL",
        required=True,
        help="a decode engine; repeatable",
    )
    add("--direction", choices=("push", "pull"), help="prefill writes the KV, or decode reads it (push)")
    add("--policy", help="how engines are chosen")
    add("--host", help="address to listen on (127.0.0.1)")
    add("--port", type=int, help="port to listen on; 0 for a free one (8000)")
    add("--trace-file", dest="trace_path", metavar="FILE", help="append one JSON line per event")
    for name in ("connect", "prefill", "decode", "idle"):
        add(f"--{name}-timeout", dest=f"{name}_timeout_s", type=float, metavar="S", help=f"{name} timeout in seconds")
    add("--max-body-bytes", type=int, metavar="N", help="largest request accepted")
    add("--drain", dest="drain_s", type=float, metavar="S", help="time for open streams when asked to stop")
    add("--log-level", help="debug, info, warning, error or critical (info)")


def _add_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("prepare", "list"))
    parser.add_argument("model", nargs="?", metavar="NAME", help="which model to prepare")
    parser.add_argument("--models-dir", metavar="DIR", help="where prepared models are kept")
    parser.add_argument("--force", action="store_true", help="prepare it again")


def _add_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("new",))
    parser.add_argument("path", type=Path, metavar="PATH", help="the file to make; must not exist")


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs")


_COMMANDS: dict[str, tuple[str, str, Callable[[argparse.ArgumentParser], None], Handler]] = {
    "up": ("Start prefill and decode engines and a router, and watch them.", flags.UP_EXAMPLES, flags.add_up, _up),
    "down": ("Stop a deployment started with `up`.", flags.DOWN_EXAMPLES, flags.add_down, _down),
    "status": ("Show what is running.", flags.STATUS_EXAMPLES, flags.add_status, _status),
    "logs": ("Show the logs of a deployment.", flags.LOGS_EXAMPLES, flags.add_logs, _logs),
    "router": ("Run the router alone, for engines started elsewhere.", _ROUTER_EXAMPLES, _add_router, _router),
    "demo": ("Show one handoff, and three ways of serving.", bench_flags.DEMO_EXAMPLES, bench_flags.add_demo, _demo),
    "bench": ("Measure ways of serving side by side.", bench_flags.BENCH_EXAMPLES, bench_flags.add_bench, _bench),
    "timeline": (
        "Show what happened to a transfer, event by event.",
        bench_flags.TIMELINE_EXAMPLES,
        bench_flags.add_timeline,
        _timeline,
    ),
    "models": ("Prepare small models that run anywhere.", _MODELS_EXAMPLES, _add_models, _models),
    "key": ("Make the key by which engines recognise each other.", _KEY_EXAMPLES, _add_key, _key),
    "doctor": ("Check this environment and say what to mend.", _DOCTOR_EXAMPLES, _add_doctor, _doctor),
}


def _complain(message: str, remedies: Sequence[str], error: BaseException) -> int:
    sys.stdout.flush()
    sys.stderr.write(f"{_PROGRAM}: error: {message}\n")
    for remedy in remedies:
        sys.stderr.write(f"  remedy: {remedy}\n")
    return 2 if isinstance(error, UsageError) else 1


def _did_you_mean(close: Sequence[str]) -> str:
    return f"Did you mean {' or '.join(close)}?" if close else ""

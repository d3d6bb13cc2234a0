"""The command line: what it says to mistakes, and what each command hands on."""

from __future__ import annotations

import subprocess
import sys
import time
import types
from pathlib import Path

import msgspec
import pytest

from kvbaton import cli
from kvbaton.errors import DeploymentError, UsageError
from kvbaton.launch import up as launch_up
from kvbaton.launch.machine import Device, Machine
from kvbaton.launch.remedy import deployment_error, usage_error
from kvbaton.launch.spec import Connector, DeploymentSpec
from kvbaton.types import Direction


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> list[DeploymentSpec]:
    """What `up` was asked to run, without running it."""
    found: list[DeploymentSpec] = []

    def up(spec: DeploymentSpec, machine: Machine, out: object, *, smoke: bool) -> int:
        del machine, out, smoke
        found.append(spec)
        return 0

    monkeypatch.setattr(launch_up, "resolve_model", lambda name: f"/models/{name}")
    monkeypatch.setattr(launch_up, "up", up)
    return found


@pytest.fixture
def routers(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """What `router` was asked to serve; the router itself has tests of its own."""
    found: list[dict[str, object]] = []

    class RouterConfig(msgspec.Struct, kw_only=True):
        decode_urls: tuple[str, ...]
        prefill_urls: tuple[str, ...] = ()
        direction: Direction = Direction.PUSH
        port: int = 8000
        trace_path: str | None = None
        drain_s: float = 30.0

    settings = types.ModuleType("kvbaton.router.settings")
    settings.RouterConfig = RouterConfig  # type: ignore[attr-defined]
    serve = types.ModuleType("kvbaton.router.serve")
    serve.serve = lambda config: found.append(msgspec.structs.asdict(config))  # type: ignore[attr-defined]
    RouterConfig.__module__ = __name__
    monkeypatch.setitem(sys.modules, "kvbaton.router.settings", settings)
    monkeypatch.setitem(sys.modules, "kvbaton.router.serve", serve)
    return found


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a call that is wrong says, having ended with exit code 2."""
    try:
        code: object = cli.main(arguments)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("kvbaton: error: ")
    return output.err


class TestMistakes:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["upp"], "command: 'upp' is unknown. Did you mean up?"),
            (["zzz"], "one of: up, down, status"),
            (["up", "--prefil", "2"], "--prefil is not known to `kvbaton up`. Did you mean --prefill"),
            (["up", "--block-sise=64"], "Did you mean --block-size?"),
            (["status", "--nonsense-xyz"], "--nonsense-xyz is not known to `kvbaton status`."),
            (["up", "--connector", "nixl-pul"], "--connector: 'nixl-pul' is unknown. Did you mean nixl-pull"),
            (["up", "--prefill", "two"], "argument --prefill: invalid int value: 'two'"),
            (["router"], "--decode"),
        ],
    )
    def test_are_answered_with_what_was_probably_meant(
        self, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert said in refused(arguments, capsys)

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["up", "--dry-run", "--cores", "x"], "cores: 'x'"),
            (["up", "--dry-run", "--prefill-ports", "80,a"], "--prefill-ports: '80,a' is not a list of ports"),
            (["up", "--dry-run", "--env", "NAME"], "--env: 'NAME' has no value"),
            (["up", "--dry-run", "--connector-config", "{"], "--connector-config"),
            (["up", "--dry-run", "--engine-args", "'open"], "--engine-args: No closing quotation"),
            (["up", "--dry-run", "--device", "cpu", "--block-size", "16"], "block size 16"),
        ],
    )
    def test_in_values_name_the_flag(self, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
        text = refused(arguments, capsys)
        assert said in text
        assert "\n  remedy: " in text

    def test_no_command_is_answered_with_the_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            cli.main([])
        assert ended.value.code == 2
        assert "commands:" in capsys.readouterr().out


class TestErrors:
    @pytest.mark.parametrize(
        ("error", "code", "said"),
        [
            (usage_error("it is wrong", "mend it"), 2, "kvbaton: error: it is wrong\n  remedy: mend it\n"),
            (deployment_error("it died", "read the log"), 1, "kvbaton: error: it died\n  remedy: read the log\n"),
            (UsageError("bare"), 2, "kvbaton: error: bare\n  remedy: fix the input and try again\n"),
            (DeploymentError("bare"), 1, "kvbaton: error: bare\n  remedy: fix the input and try again\n"),
            (
                ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn"),
                1,
                (
                    "kvbaton: error: `kvbaton up` needs 'uvicorn', which is not installed\n"
                    "  remedy: pip install 'kvbaton[router]'\n"
                ),
            ),
        ],
    )
    def test_become_two_lines_and_an_exit_code(
        self,
        error: Exception,
        code: int,
        said: str,
        specs: list[DeploymentSpec],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        del specs

        def fail(*_: object, **__: object) -> int:
            raise error

        monkeypatch.setattr(launch_up, "up", fail)
        assert cli.main(["up", "--port", "0"]) == code
        assert capsys.readouterr().err == said

    def test_our_own_bugs_are_not_hidden(self, specs: list[DeploymentSpec], monkeypatch: pytest.MonkeyPatch) -> None:
        del specs

        def fail(*_: object, **__: object) -> int:
            raise ModuleNotFoundError("No module named 'kvbaton.nowhere'", name="kvbaton.nowhere")

        monkeypatch.setattr(launch_up, "up", fail)
        with pytest.raises(ModuleNotFoundError):
            cli.main(["up", "--port", "0"])


class TestUp:
    def test_defaults(self, specs: list[DeploymentSpec]) -> None:
        assert cli.main(["up", "--port", "0"]) == 0
        assert specs == [DeploymentSpec(model="/models/smollm2", run_dir=".kvbaton/default")]

    def test_flags_reach_the_spec(self, specs: list[DeploymentSpec]) -> None:
        text = (
            "up tiny --name two --state-dir /s --prefill 2 --decode 3 --mode pull --connector baton --tp 2 --port 19000"
            ""
            " --prefill-ports 19001,19002 --decode-ports 19003,19004,19005"
            " --kv-cache-gib 0.5 --block-size 64 --max-model-len 100"
            " --max-num-batched-tokens 50 --dtype float16 --executor mp --kv-load-failure-policy recompute --no-trace"
            " --no-pin --cores 0 --host 127.0.0.2 --env A=b=c --startup-timeout 5 --log-dir /l --device cpu"
        )
        more = ["--connector-config", '{"lease_s": 3}', "--engine-args", "--seed 1", "--decode-args", "--enforce-eager"]
        assert cli.main([*text.split(), *more]) == 0
        assert specs == [
            DeploymentSpec(
                model="/models/tiny",
                name="two",
                run_dir="/s/two",
                num_prefill=2,
                num_decode=3,
                direction=Direction.PULL,
                connector=Connector.BATON,
                tp=2,
                router_port=19000,
                prefill_ports=(19001, 19002),
                decode_ports=(19003, 19004, 19005),
                kv_cache_gib=0.5,
                block_size=64,
                max_model_len=100,
                max_num_batched_tokens=50,
                dtype="float16",
                executor="mp",
                kv_load_failure_policy="recompute",
                trace=False,
                pin=False,
                cores=(0,),
                host="127.0.0.2",
                engine_env={"A": "b=c"},
                startup_timeout_s=5.0,
                log_dir="/l",
                device=Device.CPU,
                connector_config={"lease_s": 3},
                engine_args=("--seed", "1"),
                decode_args=("--enforce-eager",),
            )
        ]

    def test_engine_arguments_may_be_one_flag_or_many_and_repeated(self, specs: list[DeploymentSpec]) -> None:
        arguments = ["--engine-args", "--a 1", "--engine-args", "--b", "--engine-args=--c 'x y'", "--decode", "2"]
        assert cli.main(["up", "--port", "0", *arguments]) == 0
        assert specs[0].engine_args == ("--a", "1", "--b", "--c", "x y")
        assert specs[0].num_decode == 2


class TestRouter:
    def test_flags_reach_the_configuration(self, routers: list[dict[str, object]]) -> None:
        text = "router --prefill http://p1 --prefill http://p2 --decode http://d --direction pull --port 0 --drain 1.5"
        assert cli.main([*text.split(), "--trace-file", "/t"]) == 0
        assert routers == [
            {
                "prefill_urls": ("http://p1", "http://p2"),
                "decode_urls": ("http://d",),
                "direction": Direction.PULL,
                "port": 0,
                "trace_path": "/t",
                "drain_s": 1.5,
            }
        ]

    def test_defaults_are_the_routers_own(self, routers: list[dict[str, object]]) -> None:
        assert cli.main(["router", "--decode", "http://d"]) == 0
        assert routers[0]["drain_s"] == 30.0
        assert routers[0]["prefill_urls"] == ()


class TestHelp:
    @pytest.mark.parametrize("command", ["up", "down", "status", "logs", "router", "models", "doctor"])
    def test_every_command_has_help_with_examples(self, command: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            cli.main([command, "--help"])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert "examples:\n  kvbaton " + command in text
        assert "engine-command" not in text

    def test_help_imports_nothing_heavy_and_is_quick(self) -> None:
        code = (
            "import sys\nfrom kvbaton.cli import main\n"
            "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
            "heavy = {'psutil', 'rich', 'uvicorn', 'aiohttp', 'msgspec', 'numpy', 'torch', 'vllm'} & set(sys.modules)\n"
            "assert not heavy, heavy\n"
        )
        started_s = time.monotonic()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        assert time.monotonic() - started_s < 5.0

    def test_the_version_is_the_packages(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "kvbaton", "--version"], check=True, capture_output=True, text=True
        )
        assert done.stdout.startswith("kvbaton 0.")


def test_nothing_running_is_not_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--state-dir", str(tmp_path)]) == 0
    assert cli.main(["status", "--json", "--state-dir", str(tmp_path)]) == 0
    assert cli.main(["down", "--all", "--state-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "nothing is running\n[]\nnothing is running\n"


def test_a_reader_that_has_enough_is_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "default" / "logs").mkdir(parents=True)
    (tmp_path / "default" / "logs" / "decode-0.log").write_text("line\n" * 100_000)
    command = [sys.executable, "-m", "kvbaton", "logs", "-n", "90000", "--state-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stderr is not None
        assert reader.stdout.readline() == b"decode-0: line\n"
        reader.stdout.close()
        assert reader.stderr.read() == b""
        assert reader.wait(20) == 0

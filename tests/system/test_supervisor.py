"""The launcher with engines that are fake but processes that are real: starting, dying, stopping, leaving nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kvbaton.errors import DeploymentError
from kvbaton.launch.identity import Identity
from kvbaton.launch.operate import down, status
from kvbaton.launch.smoke import first_request
from kvbaton.launch.spec import Connector, DeploymentSpec
from kvbaton.launch.state import DeploymentState, Phase, RunDir
from kvbaton.launch.supervisor import Deployment, Interrupted

FAKE = (sys.executable, str(Path(__file__).with_name("fake_engine.py")))
PATIENCE_S = 30.0

Marked = Callable[[], list[int]]


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Marked]:
    """Every process this test started, however far down, by a variable they all inherit."""
    token = f"KVBATON_TEST={uuid.uuid4().hex}"
    monkeypatch.setenv(*token.split("="))

    def find() -> list[int]:
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                content = environ.read_bytes()
            except OSError:
                continue
            if token.encode() in content and Identity.of(int(environ.parent.name)):
                found.append(int(environ.parent.name))
        return found

    yield find
    for pid in find():
        os.kill(pid, signal.SIGKILL)


def fake_spec(tmp_path: Path, **fields: object) -> DeploymentSpec:
    values: dict[str, object] = {
        "model": "fake",
        "run_dir": str(tmp_path / "default"),
        "engine_command": FAKE,
        "router_command": FAKE,
        "startup_timeout_s": PATIENCE_S,
        "stop_timeout_s": 2.0,
    }
    return DeploymentSpec(**(values | fields))  # type: ignore[arg-type]


def until(condition: Callable[[], object], what: str) -> None:
    give_up_at_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_at_s, f"{what} did not happen"
        time.sleep(0.05)


class TestDeployment:
    def test_everybody_serves_and_nothing_is_left(self, tmp_path: Path, marked: Marked) -> None:
        spec = fake_spec(tmp_path, num_prefill=2, engine_args=("--worker",))
        with Deployment(spec) as deployment:
            assert [each.name for each in deployment.instances] == ["prefill-0", "prefill-1", "decode-0"]
            assert [each.name for each in deployment.by_role("decode")] == ["decode-0"]
            # Four commands, a leash each, and a worker for each engine.
            assert len(marked()) == 4 + 4 + 3
            assert all("fake_engine" in Path(f"/proc/{each.pid}/cmdline").read_text() for each in deployment.instances)
            assert "first request: 60 tokens in, 8 out" in first_request(deployment)
        assert marked() == []
        assert not (tmp_path / "default" / "state.json").exists()
        assert (tmp_path / "default" / "logs" / "prefill-1.log").read_text().startswith("INFO Starting")

    def test_the_state_file_tells_others_what_runs(self, tmp_path: Path, marked: Marked) -> None:
        with Deployment(fake_spec(tmp_path)) as deployment:
            state = RunDir(tmp_path / "default").read()
            assert state is not None
            assert state.phase is Phase.READY
            assert state.router_url == deployment.router_url
            assert [(each.role, each.pid) for each in state.instances] == [
                (each.role, each.pid) for each in deployment.instances
            ]
            assert state.launcher.pid == os.getpid()
        assert marked() == []

    def test_the_engines_share_a_key_that_is_seen_nowhere_and_ends_with_them(
        self, tmp_path: Path, marked: Marked
    ) -> None:
        key_path = tmp_path / "default" / "cluster.key"
        with Deployment(fake_spec(tmp_path)) as deployment:
            key = key_path.read_text().strip()
            assert len(key) == 64
            assert key_path.stat().st_mode & 0o777 == 0o600
            for instance in deployment.instances:
                config = instance.plan.argv[instance.plan.argv.index("--kv-transfer-config") + 1]
                assert json.loads(config)["kv_connector_extra_config"]["cluster_key_file"] == str(key_path)
            assert "cluster_key_file" not in deployment.router.plan.shell()
            deployment.kill(deployment.instances[0])
            deployment.start(deployment.instances[0])
            assert key_path.read_text().strip() == key  # whoever comes back must be recognised
            for pid in [os.getpid(), *marked()]:
                for what in ("cmdline", "environ"):
                    assert key.encode() not in Path(f"/proc/{pid}/{what}").read_bytes()
            others = [each for each in (tmp_path / "default").rglob("*") if each.is_file() and each != key_path]
            assert tmp_path / "default" / "state.json" in others
            assert not [each for each in others if key.encode() in each.read_bytes()]
        assert not key_path.exists()
        assert marked() == []

    def test_every_start_has_a_key_of_its_own(self, tmp_path: Path, marked: Marked) -> None:
        """Also after one that was killed and left its key behind."""
        key_path, keys = tmp_path / "default" / "cluster.key", set[str]()
        key_path.parent.mkdir()
        key_path.write_text("left over")
        for _ in range(2):
            with Deployment(fake_spec(tmp_path)):
                keys.add(key_path.read_text())
        assert len(keys) == 2
        assert "left over" not in keys
        assert marked() == []

    def test_a_start_that_fails_leaves_no_key(self, tmp_path: Path, marked: Marked) -> None:
        with pytest.raises(DeploymentError):
            Deployment(fake_spec(tmp_path, decode_args=("--die-before-ready", "3"))).open()
        assert not (tmp_path / "default" / "cluster.key").exists()
        assert marked() == []

    @pytest.mark.parametrize(
        "fields", [{"connector_config": {"cluster_key_file": "/elsewhere"}}, {"connector": Connector.NONE}]
    )
    def test_no_key_is_made_where_none_is_used(self, tmp_path: Path, marked: Marked, fields: dict[str, object]) -> None:
        with Deployment(fake_spec(tmp_path, **fields)) as deployment:
            assert not (tmp_path / "default" / "cluster.key").exists()
            shown = deployment.instances[0].plan.shell()
            assert ("/elsewhere" in shown) == ("connector_config" in fields)
        assert marked() == []

    def test_the_first_request_reports_the_kv_that_moved(self, tmp_path: Path, marked: Marked) -> None:
        with Deployment(fake_spec(tmp_path)) as deployment:
            assert "KV moved: 2.00 MB in 4.0 ms (1 segment)" in first_request(deployment)
        with Deployment(fake_spec(tmp_path, connector=Connector.NONE)) as deployment:
            assert "KV" not in first_request(deployment)
        assert marked() == []

    def test_a_death_during_start_stops_all_and_is_explained(self, tmp_path: Path, marked: Marked) -> None:
        spec = fake_spec(tmp_path, decode_args=("--die-before-ready", "3", "--worker"))
        with pytest.raises(DeploymentError) as failed:
            Deployment(spec).open()
        text = str(failed.value)
        assert "decode-0 ended with exit code 3 before it was ready" in text
        assert "most telling: ValueError: the model does not fit" in text
        assert "  | INFO Starting to load model" in text
        assert failed.value.__notes__
        assert marked() == []
        assert not (tmp_path / "default" / "state.json").exists()

    def test_a_start_that_never_ends_is_given_up(self, tmp_path: Path, marked: Marked) -> None:
        spec = fake_spec(tmp_path, prefill_args=("--never-ready",), startup_timeout_s=1.5)
        with pytest.raises(DeploymentError, match="prefill-0 not ready after 2 s"):
            Deployment(spec).open()
        assert marked() == []

    def test_a_command_that_does_not_exist_is_explained(self, tmp_path: Path, marked: Marked) -> None:
        spec = fake_spec(tmp_path, engine_command=("/nowhere/vllm",), pin=False)
        with pytest.raises(DeploymentError, match="ended with exit code 127") as failed:
            Deployment(spec).open()
        assert "Install vLLM" in failed.value.__notes__[0]
        assert marked() == []

    def test_an_engine_that_ignores_sigterm_is_killed(self, tmp_path: Path, marked: Marked) -> None:
        spec = fake_spec(tmp_path, engine_args=("--ignore-sigterm", "--worker"), stop_timeout_s=0.5)
        with Deployment(spec):
            started_s = time.monotonic()
        assert marked() == []
        assert time.monotonic() - started_s < PATIENCE_S / 2

    def test_even_a_killed_leash_leaves_nothing(self, tmp_path: Path, marked: Marked) -> None:
        with Deployment(fake_spec(tmp_path, engine_args=("--plain-worker",))) as deployment:
            state = RunDir(tmp_path / "default").read()
            assert state is not None
            leash = state.instances[0].leash
            assert leash is not None
            leash.send(signal.SIGKILL)
            until(lambda: deployment.instances[0].exit_code is not None, "the death being noticed")
            with pytest.raises(DeploymentError, match="prefill-0 was ended by SIGKILL"):
                deployment.check()
            assert len(marked()) == 3 + 2 + 1  # router and decode with leashes, decode's worker, and the orphan
        assert marked() == []

    def test_an_engine_can_be_killed_and_started_again(self, tmp_path: Path, marked: Marked) -> None:
        with Deployment(fake_spec(tmp_path, engine_args=("--worker",))) as deployment:
            (decode,) = deployment.by_role("decode")
            before = decode.pid
            deployment.kill(decode)
            with pytest.raises(DeploymentError, match="decode-0 was ended by SIGKILL"):
                deployment.check()
            deployment.start(decode)
            deployment.check()
            assert decode.pid != before
            assert len(marked()) == 3 + 3 + 2
        assert marked() == []

    def test_a_stop_during_start_ends_it(self, tmp_path: Path, marked: Marked) -> None:
        spec = fake_spec(tmp_path, prefill_args=("--never-ready",))
        with pytest.raises(Interrupted):
            Deployment(spec, interruptions=lambda: 1).open()
        assert marked() == []

    def test_a_second_one_of_the_same_name_is_refused_and_leaves_the_first_alone(
        self, tmp_path: Path, marked: Marked
    ) -> None:
        with Deployment(fake_spec(tmp_path)) as first:
            with pytest.raises(DeploymentError, match="already running at") as refused:
                Deployment(fake_spec(tmp_path)).open()
            assert "kvbaton down" in refused.value.__notes__[0]
            first.check()
            assert RunDir(tmp_path / "default").read() is not None
        assert marked() == []


class Launcher:
    """`kvbaton` as a user runs it."""

    def __init__(self, tmp_path: Path) -> None:
        self._root = tmp_path
        self._model = tmp_path / "model"
        self._model.mkdir()
        (self._model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
        self.started: list[subprocess.Popen[str]] = []

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "kvbaton", *arguments, "--state-dir", str(self._root)]

    def up_command(self, *arguments: str) -> list[str]:
        fake = " ".join(FAKE)
        hidden = ("--engine-command", fake, "--router-command", fake)
        return self.command("up", str(self._model), "--port", "0", *hidden, *arguments)

    def up(self, *arguments: str) -> subprocess.Popen[str]:
        """Started, and serving."""
        launcher = subprocess.Popen(
            self.up_command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.started.append(launcher)
        until(lambda: launcher.poll() is not None or self.phase() is Phase.READY, "the deployment serving")
        return launcher

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(*arguments), capture_output=True, text=True, timeout=60, check=False)

    def state(self, name: str = "default") -> DeploymentState | None:
        return RunDir(self._root / name).read()

    def phase(self) -> Phase | None:
        state = self.state()
        return state.phase if state else None


@pytest.fixture
def launcher(tmp_path: Path, marked: Marked) -> Iterator[Launcher]:
    made = Launcher(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()
    until(lambda: not marked(), "everything ending")


class TestUp:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_a_stop_signal_ends_everything_cleanly(
        self, launcher: Launcher, marked: Marked, number: signal.Signals
    ) -> None:
        process = launcher.up("--engine-args", "--worker")
        process.send_signal(number)
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, output
        assert "curl http://127.0.0.1:" in output
        assert "KV moved: 2.00 MB" in output
        assert output.endswith("stopped\n")
        assert "Traceback" not in output
        assert marked() == []
        assert launcher.state() is None

    @pytest.mark.parametrize("victim", ["prefill-0", "decode-0", "router"])
    def test_the_death_of_a_child_ends_everything_with_its_name(
        self, launcher: Launcher, marked: Marked, victim: str
    ) -> None:
        process = launcher.up()
        state = launcher.state()
        assert state is not None
        os.kill(next(each.pid for each in state.processes() if each.name == victim), signal.SIGKILL)
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert f"kvbaton: error: {victim} was ended by SIGKILL while serving" in output
        assert "  remedy: " in output
        assert marked() == []

    def test_killing_the_launcher_leaves_nothing(self, launcher: Launcher, marked: Marked) -> None:
        process = launcher.up("--engine-args", "--worker --ignore-sigterm")
        assert len(marked()) > 5
        process.kill()
        process.wait()
        until(lambda: not marked(), "the engines ending by themselves")
        assert '"phase": "stale"' in launcher.run("status", "--json").stdout
        # What it left recorded does not stand in the way.
        again = launcher.up()
        assert again.poll() is None
        assert launcher.run("down").returncode == 0

    def test_a_failed_start_is_explained_without_a_traceback(self, launcher: Launcher, marked: Marked) -> None:
        done = subprocess.run(
            launcher.up_command("--prefill-args", "--die-before-ready 5"),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 1
        assert "prefill-0 ended with exit code 5 before it was ready" in done.stderr
        assert "Traceback" not in done.stderr
        assert marked() == []

    def test_a_port_in_use_is_named_before_anything_starts(self, launcher: Launcher, marked: Marked) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = str(taken.getsockname()[1])
            done = subprocess.run(
                [*launcher.up_command(), "--port", port], capture_output=True, text=True, timeout=60, check=False
            )
        assert done.returncode == 2
        assert f"port {port} for the router is in use" in done.stderr
        assert marked() == []

    def test_a_second_up_is_refused_with_the_remedy(self, launcher: Launcher) -> None:
        launcher.up()
        done = subprocess.run(launcher.up_command(), capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert "deployment 'default' is already running at http://" in done.stderr
        assert "kvbaton down --name default" in done.stderr

    def test_a_detached_deployment_is_seen_read_and_stopped_by_others(self, launcher: Launcher, marked: Marked) -> None:
        up = subprocess.run(launcher.up_command("--detach"), capture_output=True, text=True, timeout=60, check=False)
        assert up.returncode == 0, up.stderr
        assert "running in the background" in up.stdout
        assert "first request" in up.stdout
        (seen,) = json.loads(launcher.run("status", "--json").stdout)
        assert (seen["name"], seen["phase"]) == ("default", "ready")
        assert [(each["name"], each["serving"]) for each in seen["processes"]] == [
            ("router", True),
            ("decode-0", True),
            ("prefill-0", True),
        ]
        assert "decode-0   serving" in launcher.run("status").stdout
        assert launcher.run("logs", "decode").stdout == "decode-0: INFO Starting to load model\n"
        unknown = launcher.run("logs", "encode")
        assert unknown.returncode == 2
        assert "There are: router, decode-0, prefill-0." in unknown.stderr
        assert launcher.run("down", "--all").stdout == "stopping default\n"
        assert marked() == []
        assert launcher.run("down").stdout == "no deployment named 'default' is running\n"
        # The logs stay.
        assert launcher.run("logs", "decode").stdout == "decode-0: INFO Starting to load model\n"

    def test_a_detached_start_that_fails_says_so(self, launcher: Launcher, marked: Marked) -> None:
        done = subprocess.run(
            launcher.up_command("--detach", "--decode-args", "--die-before-ready 1"),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 1
        assert "decode-0 ended with exit code 1" in done.stdout
        assert marked() == []

    def test_logs_can_be_followed(self, launcher: Launcher) -> None:
        launcher.up()
        state = launcher.state()
        assert state is not None
        with subprocess.Popen(launcher.command("logs", "router", "-f"), stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "router: INFO Starting to load model\n"
            time.sleep(0.5)
            assert state.router is not None
            with Path(state.router.log_path).open("a") as log:
                log.write("something new\n")
            assert reader.stdout.readline() == "router: something new\n"
            reader.send_signal(signal.SIGINT)
            assert reader.wait(PATIENCE_S) == 0

    def test_a_dry_run_prints_and_starts_nothing(self, launcher: Launcher, marked: Marked, tmp_path: Path) -> None:
        done = subprocess.run(launcher.up_command("--dry-run"), capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0
        about_key, *names = [line for line in done.stdout.splitlines() if line.startswith("#")]
        assert "kvbaton key new" in about_key
        assert names == [
            "# prefill-0",
            "# decode-0",
            "# router",
        ]
        assert "VLLM_CPU_KVCACHE_SPACE=1" in done.stdout
        assert not (tmp_path / "default").exists()
        assert marked() == []


def test_down_touches_no_process_that_only_has_the_number(tmp_path: Path) -> None:
    """A state file from before a restart may name numbers that belong to others now."""
    with subprocess.Popen(["sleep", "60"]) as bystander:
        real = Identity.of(bystander.pid)
        assert real is not None
        gone = Identity(real.pid, real.started_ticks + 1)
        with Deployment(fake_spec(tmp_path)):
            state = RunDir(tmp_path / "default").read()
        assert state is not None
        assert state.router is not None
        text = tmp_path / "old" / "state.json"
        text.parent.mkdir()
        old = msgspec.structs.replace(
            state,
            name="old",
            launcher=gone,
            router=msgspec.structs.replace(state.router, pid=real.pid, process=gone, leash=gone),
        )
        RunDir(tmp_path / "old").write(old)
        assert down(tmp_path, "old", sys.stdout) == 0
        assert bystander.poll() is None
        assert not text.exists()
        assert status(tmp_path, sys.stdout, as_json=False) == 0
        bystander.kill()

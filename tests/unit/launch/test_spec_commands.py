"""The exact command lines and environments a spec becomes. Pinned: these are what users copy."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path

import msgspec
import pytest

from kvbaton.errors import UsageError
from kvbaton.launch.machine import Device, Machine
from kvbaton.launch.plan import DeploymentPlan, ProcessPlan, build_plan
from kvbaton.launch.ports import Ports
from kvbaton.launch.spec import Connector, DeploymentSpec
from kvbaton.types import Direction

TWO_CORES = Machine(cores=(0, 1), device=Device.CPU, taskset="/bin/taskset", vllm="/env/vllm", python="/env/python")
EIGHT_GPUS = Machine(
    cores=tuple(range(64)),
    device=Device.CUDA,
    gpus=tuple("01234567"),
    taskset="/bin/taskset",
    vllm="/env/vllm",
    python="/env/python",
)
ENGINE_PORTS: dict[str, object] = {"prefill_ports": (18101,), "decode_ports": (18102,)}


def planned(machine: Machine = TWO_CORES, /, **fields: object) -> DeploymentPlan:
    values: dict[str, object] = {"model": "hub/tiny", "router_port": 18100, "run_dir": "/run"} | fields
    return build_plan(DeploymentSpec(**values), machine)  # type: ignore[arg-type]


def transfer_config(process: ProcessPlan) -> dict[str, object]:
    return msgspec.json.decode(process.argv[process.argv.index("--kv-transfer-config") + 1], type=dict[str, object])


def flag(process: ProcessPlan, name: str) -> str | None:
    return process.argv[process.argv.index(name) + 1] if name in process.argv else None


def test_the_default_pair_on_two_cores() -> None:
    prefill, decode = planned(**ENGINE_PORTS).engines
    assert prefill.env == {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
    }
    assert shlex.join(prefill.argv[:-1]) == (
        "/bin/taskset -c 0 /env/vllm serve hub/tiny --host 127.0.0.1 --port 18101 --served-model-name hub/tiny"
        " --enforce-eager --dtype bfloat16 --block-size 32 --distributed-executor-backend uni --kv-transfer-config"
    )
    assert transfer_config(prefill) == {
        "kv_connector": "BatonConnector",
        "kv_connector_module_path": "kvbaton.connector",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {
            "side_channel_host": "127.0.0.1",
            "side_channel_port": 0,
            "cluster_key_file": "/run/cluster.key",
            "trace_path": "/run/traces/prefill-0.jsonl",
        },
    }
    assert decode.argv[:3] == ("/bin/taskset", "-c", "1")
    assert transfer_config(decode)["kv_role"] == "kv_consumer"
    assert decode.log_path == "/run/logs/decode-0.log"


def test_the_router_knows_everybody_and_the_direction() -> None:
    router = planned(**ENGINE_PORTS, direction=Direction.PULL, router_args=("--log-level", "debug")).router
    assert shlex.join(router.argv) == (
        "/env/python -m kvbaton router --host 127.0.0.1 --port 18100 --prefill http://127.0.0.1:18101"
        " --decode http://127.0.0.1:18102 --direction pull --drain 5 --trace-file /run/traces/router.jsonl --log-level debug"
    )


def test_without_traces_no_path_is_passed() -> None:
    plan = planned(trace=False)
    assert "trace_path" not in str(transfer_config(plan.engines[0]))
    assert "--trace-file" not in plan.router.argv


def test_aggregated_is_one_engine_with_all_cores_and_a_decode_only_router() -> None:
    plan = planned(connector=Connector.NONE, decode_ports=(18102,))
    (engine,) = plan.engines
    assert (engine.name, engine.role, engine.cores) == ("engine-0", "both", (0, 1))
    assert engine.argv[:3] == ("/bin/taskset", "-c", "0-1")
    assert engine.env["OMP_NUM_THREADS"] == "2"
    assert "--kv-transfer-config" not in engine.argv
    assert "--prefill" not in plan.router.argv
    assert flag(plan.router, "--decode") == "http://127.0.0.1:18102"
    assert "--direction" not in plan.router.argv


@pytest.mark.parametrize(
    ("connector", "name"), [(Connector.NIXL_PULL, "NixlConnector"), (Connector.NIXL_PUSH, "NixlPushConnector")]
)
def test_in_tree_connectors_meet_on_ports_of_their_own(connector: Connector, name: str) -> None:
    plan = planned(connector=connector, side_channel_ports=(0, 18105))
    assert transfer_config(plan.engines[0]) == {
        "kv_connector": name,
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "fail",
    }
    ports = [engine.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for engine in plan.engines]
    assert ports[1] == "18105"
    assert ports[0] not in ("0", "18105")
    assert {engine.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] for engine in plan.engines} == {"127.0.0.1"}
    assert all(engine.trace_path is None for engine in plan.engines)


def test_sizes_and_the_users_own_arguments_come_last() -> None:
    plan = planned(
        block_size=64,
        max_model_len=2048,
        max_num_batched_tokens=512,
        dtype="float32",
        kv_cache_gib=2,
        engine_args=("--seed", "1"),
        decode_args=("--seed", "2"),
        engine_env={"OMP_NUM_THREADS": "7"},
        connector_config={"lease_s": 3},
        kv_load_failure_policy="recompute",
    )
    prefill, decode = plan.engines
    sizes = ("--block-size", "--max-model-len", "--max-num-batched-tokens", "--dtype")
    assert [flag(prefill, name) for name in sizes] == ["64", "2048", "512", "float32"]
    assert prefill.env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert prefill.env["OMP_NUM_THREADS"] == "7"
    assert prefill.argv[-2:] == ("--seed", "1")
    assert decode.argv[-4:] == ("--seed", "1", "--seed", "2")
    assert transfer_config(decode)["kv_load_failure_policy"] == "recompute"
    extra = transfer_config(decode)["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    assert extra["lease_s"] == 3


def test_a_fraction_of_a_gib_goes_through_the_flag() -> None:
    engine = planned(kv_cache_gib=0.25).engines[0]
    assert "VLLM_CPU_KVCACHE_SPACE" not in engine.env
    assert flag(engine, "--kv-cache-memory-bytes") == str(1 << 28)


def test_several_ranks_on_a_cpu_need_the_multiprocess_executor_and_its_own_binding() -> None:
    machine = msgspec.structs.replace(TWO_CORES, cores=tuple(range(8)))
    engine = planned(machine, tp=2).engines[1]
    assert flag(engine, "--distributed-executor-backend") == "mp"
    assert flag(engine, "--tensor-parallel-size") == "2"
    assert engine.env["VLLM_CPU_OMP_THREADS_BIND"] == "4-5|6-7"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in engine.env


def test_unpinned_engines_may_use_every_core() -> None:
    engine = planned(pin=False).engines[0]
    assert engine.argv[0] == "/env/vllm"
    assert engine.env["OMP_NUM_THREADS"] == "2"
    engine = planned(pin=False, executor="mp").engines[0]
    assert engine.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_without_taskset_the_leash_pins() -> None:
    engine = planned(msgspec.structs.replace(TWO_CORES, taskset=None)).engines[0]
    assert engine.argv[:6] == ("/env/python", "-m", "kvbaton.launch.leash", "--cores", "0", "--")


def test_cores_can_be_given_by_role() -> None:
    machine = msgspec.structs.replace(TWO_CORES, cores=tuple(range(8)))
    plan = planned(machine, num_prefill=2, prefill_cores=(0, 1, 2, 3), decode_cores=(7,))
    assert [engine.cores for engine in plan.engines] == [(0, 1), (2, 3), (7,)]
    assert not plan.warnings


def test_engines_that_must_share_cores_are_warned_about() -> None:
    plan = planned(num_prefill=2)
    assert [engine.cores for engine in plan.engines] == [(0,), (1,), (0,)]
    assert "share cores" in plan.warnings[0]


def test_cores_of_another_machine_are_refused() -> None:
    with pytest.raises(UsageError, match="5 not usable"):
        planned(prefill_cores=(5,))


@pytest.mark.parametrize(
    "fields",
    [{"block_size": 16}, {"decode_args": ("--block-size", "48")}, {"engine_args": ("--block-size=8",)}],
)
def test_a_block_size_the_cpu_attention_cannot_do_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"block size .* multiple of 32"):
        planned(**fields)
    assert planned(EIGHT_GPUS, **fields).engines  # a GPU can


def test_a_local_folder_is_served_under_its_own_name_and_offline(tmp_path: Path) -> None:
    folder = tmp_path / "smollm2"
    folder.mkdir()
    engine = planned(model=str(folder)).engines[0]
    assert flag(engine, "--served-model-name") == "smollm2"
    assert engine.env["HF_HUB_OFFLINE"] == "1"


def test_gpu_engines_get_gpus_and_none_of_the_cpu_flags() -> None:
    plan = planned(EIGHT_GPUS, tp=2, num_prefill=2, kv_cache_gib=4, decode_ports=(18102,))
    assert [engine.env["CUDA_VISIBLE_DEVICES"] for engine in plan.engines] == ["0,1", "2,3", "4,5"]
    engine = plan.engines[2]
    assert shlex.join(engine.argv[:-1]) == (
        "/env/vllm serve hub/tiny --host 127.0.0.1 --port 18102 --served-model-name hub/tiny"
        " --tensor-parallel-size 2 --kv-cache-memory-bytes 4294967296 --kv-transfer-config"
    )
    assert not [name for name in engine.env if "CPU" in name or "OMP" in name]
    assert engine.cores == ()


def test_rocm_engines_are_told_by_its_own_variable() -> None:
    engine = planned(msgspec.structs.replace(EIGHT_GPUS, device=Device.ROCM)).engines[1]
    assert engine.env["HIP_VISIBLE_DEVICES"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in engine.env


def test_too_few_gpus_are_refused_unless_shared() -> None:
    one = msgspec.structs.replace(EIGHT_GPUS, gpus=("3",))
    with pytest.raises(UsageError, match="2 engines need 2 GPUs, 1 are visible"):
        planned(one)
    plan = planned(one, share_gpus=True)
    assert [engine.env["CUDA_VISIBLE_DEVICES"] for engine in plan.engines] == ["3", "3"]
    assert flag(plan.engines[0], "--gpu-memory-utilization") == "0.45"
    with pytest.raises(UsageError, match="engines of 2 ranks on 1 GPUs"):
        planned(one, share_gpus=True, tp=2)


def test_pipeline_stages_are_ranks_with_gpus_and_ports_of_their_own() -> None:
    plan = planned(EIGHT_GPUS, prefill_pp=2, prefill_tp=2)
    assert [engine.env["CUDA_VISIBLE_DEVICES"] for engine in plan.engines] == ["0,1,2,3", "4"]
    assert flag(plan.engines[0], "--pipeline-parallel-size") == "2"
    assert "--pipeline-parallel-size" not in plan.engines[1].argv


def test_commands_for_a_gpu_machine_can_be_made_on_one_without() -> None:
    plan = planned(device=Device.CUDA)
    assert plan.gpus_missing
    assert [engine.env["CUDA_VISIBLE_DEVICES"] for engine in plan.engines] == ["0", "1"]
    assert "no cuda GPU" in plan.warnings[0]


def test_all_ports_differ() -> None:
    plan = planned(num_prefill=8, num_decode=8, router_port=0)
    ports = [process.port for process in (*plan.engines, plan.router)]
    assert len(set(ports)) == 17


def test_a_port_in_use_is_refused_naming_port_and_process() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"port {port} for decode-0 is in use by .*pid \d+"):
            planned(decode_ports=(port,))


def test_every_address_is_shown_as_one_that_can_be_reached() -> None:
    plan = planned(host="0.0.0.0")
    assert plan.router.url == "http://127.0.0.1:18100"
    assert flag(plan.router, "--host") == "0.0.0.0"
    assert flag(plan.engines[0], "--host") == "127.0.0.1"


def test_a_shell_line_is_the_command_with_its_environment() -> None:
    router = planned().router
    process = msgspec.structs.replace(router, argv=("run", "a b"), env={"KEY": "x y"})
    assert process.shell() == "KEY='x y' run 'a b'"


def test_ranks_of_one_engine_get_consecutive_ports() -> None:
    """Found: an engine of two ranks could not start, because the connector was told to take any free port."""
    ports = Ports()
    first = ports.take_run("127.0.0.1", 3, what="three ranks")
    second = ports.take_run("127.0.0.1", 3, what="three others")
    assert not set(range(first, first + 3)).intersection(range(second, second + 3))
    with pytest.raises(UsageError, match="consecutive free ports for too many"):
        ports.take_run("127.0.0.1", 70000, what="too many")

"""What is started: deployments of modes, the second router, the load generator; and how results are shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbaton.bench import flags, modes, passage
from kvbaton.bench.comparison import run_line
from kvbaton.bench.load import BenchRun, Load, bench_argv
from kvbaton.bench.modes import MODES, Setup, cores_text, modes_named, spec_of
from kvbaton.bench.records import Distribution, ModeReport, RunFigures, RunReport
from kvbaton.bench.second_router import router_plan
from kvbaton.bench.text import comparison_rows, markdown_table, table
from kvbaton.errors import UsageError
from kvbaton.launch.engine_command import kv_transfer_config
from kvbaton.launch.machine import Device, Machine
from kvbaton.launch.plan import build_plan
from kvbaton.launch.spec import Role
from kvbaton.types import Direction

TWO_CORES = Machine(cores=(0, 1), device=Device.CPU, taskset="/usr/bin/taskset", python="python")
SETUP = Setup(model="/models/tiny", state_root=Path("state"), machine=TWO_CORES, cores=(0, 1), engine_args=("--flag",))


class TestModes:
    @pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
    def test_all_have_the_same_executor_and_one_core_per_engine_of_a_pair(self, mode: modes.Mode) -> None:
        plan = build_plan(spec_of(mode, SETUP), TWO_CORES)
        assert len(plan.engines) == (2 if mode.is_pair else 1)
        for engine in plan.engines:
            assert engine.argv[engine.argv.index("--distributed-executor-backend") + 1] == "uni"
            assert "--flag" in engine.argv
            assert engine.env["OMP_NUM_THREADS"] == str(len(engine.cores))
        used = [core for engine in plan.engines for core in engine.cores]
        assert used == ([0] if mode.is_on_one_core else [0, 1])

    def test_connectors_are_what_the_names_say(self) -> None:
        found = {}
        for mode in MODES:
            spec = spec_of(mode, SETUP)
            plan = build_plan(spec, TWO_CORES)
            role = Role.PREFILL if mode.is_pair else Role.BOTH
            config = kv_transfer_config(spec, role, plan.engines[0])
            found[mode.name] = (config.get("kv_connector"), spec.effective_direction.value)
        assert found["kvbaton-push"] == ("BatonConnector", "push")
        assert found["kvbaton-pull"] == ("BatonConnector", "pull")
        assert found["nixl-pull"] == found["nixl-pull-edited"] == ("NixlConnector", "pull")
        assert found["nixl-push"] == found["nixl-push-edited"] == ("NixlPushConnector", "push")
        assert found["aggregated"][0] is found["aggregated-1core"][0] is None

    def test_names_choose_in_their_order(self) -> None:
        assert [mode.name for mode in modes_named("kvbaton-pull, aggregated")] == ["kvbaton-pull", "aggregated"]
        with pytest.raises(UsageError, match=r"'x' is unknown\. Modes: aggregated-1core, aggregated, "):
            modes_named("x")

    def test_flags_name_every_mode(self) -> None:
        assert modes_named(flags._MODES) == MODES

    def test_every_edited_mode_says_so_in_its_title(self) -> None:
        assert [mode for mode in MODES if mode.is_hand_edited]
        assert all(("hand-edited" in mode.title) == mode.is_hand_edited for mode in MODES)

    def test_cores_are_told(self) -> None:
        shared = Setup(model="m", state_root=Path("s"), machine=TWO_CORES, cores=(0,))
        three = Setup(model="m", state_root=Path("s"), machine=TWO_CORES, cores=(0, 1, 2))
        assert cores_text(modes.KVBATON_PUSH, SETUP) == "1 + 1"
        assert cores_text(modes.KVBATON_PUSH, three) == "2 + 1"
        assert cores_text(modes.KVBATON_PUSH, shared) == "1, shared"
        assert cores_text(modes.AGGREGATED, SETUP) == "2"
        assert cores_text(modes.AGGREGATED_ONE_CORE, SETUP) == "1"


def test_a_gpu_is_shared_by_a_pair_and_told_as_such() -> None:
    machine = Machine(cores=(0, 1), device=Device.CUDA, gpus=("0",))
    setup = Setup(model="/models/tiny", state_root=Path("state"), machine=machine, cores=(0, 1))
    for mode in (modes.KVBATON_PUSH, modes.AGGREGATED):
        plan = build_plan(spec_of(mode, setup), machine)
        assert {engine.env["CUDA_VISIBLE_DEVICES"] for engine in plan.engines} == {"0"}
        assert cores_text(mode, setup) == "1 GPU"


def test_the_second_router_differs_in_direction_port_log_and_trace() -> None:
    setup = Setup(model="/models/tiny", state_root=Path("state"), machine=TWO_CORES, cores=(0, 1), trace=True)
    first = build_plan(spec_of(modes.KVBATON_PUSH, setup), TWO_CORES).router
    second = router_plan(first, Direction.PULL, 1234)
    changed = {new for old, new in zip(first.argv, second.argv, strict=True) if old != new}
    assert changed == {"pull", "1234", second.trace_path}
    assert second.port == 1234
    assert second.log_path.endswith("router-pull.log")
    assert (second.trace_path or "").endswith("router-pull.jsonl")


def test_the_second_router_writes_no_trace_where_the_first_does_not() -> None:
    first = build_plan(spec_of(modes.KVBATON_PUSH, SETUP), TWO_CORES).router
    second = router_plan(first, Direction.PULL, 1234)
    assert "--trace-file" not in second.argv
    assert second.trace_path is None


class TestLoad:
    def test_the_file_says_what_was_run(self) -> None:
        load = Load(num_prompts=20, rate_per_s=0.5, input_tokens=1000, output_tokens=32)
        assert load.file_name("nixl-pull", 2) == "nixl-pull_qps0.5_in1000_out32_iter2.json"

    def test_the_command_fixes_seed_lengths_and_output(self) -> None:
        run = BenchRun(
            load=Load(num_prompts=20, rate_per_s=0.5, input_tokens=1000, output_tokens=32),
            seed=7,
            url="http://127.0.0.1:8000",
            model="/models/tiny",
            model_name="tiny",
            result_path=Path("/out/a.json"),
            log_path=Path("/log"),
            metadata={"mode": "a"},
            command=("vllm", "bench", "serve"),
        )
        words = " ".join(bench_argv(run))
        for expected in (
            "vllm bench serve --backend openai --base-url http://127.0.0.1:8000",
            "--model /models/tiny --served-model-name tiny",
            "--dataset-name random --seed 7 --num-prompts 20",
            "--random-input-len 1000 --random-output-len 32 --request-rate 0.5 --ignore-eos",
            "--save-result --save-detailed --result-dir /out --result-filename a.json",
            "--metadata mode=a",
        ):
            assert expected in words
        assert "--num-warmups" not in words


def figures(ttft_ms: float, failed: int = 0) -> RunFigures:
    flat = Distribution(mean=ttft_ms, median=ttft_ms, std=0.0, p50=ttft_ms, p90=ttft_ms, p99=ttft_ms * 2)
    return RunFigures(completed=4, failed=failed, ttft_ms=flat, tpot_ms=None, itl_ms=None, e2el_ms=flat)


def mode_report(*runs: RunReport) -> ModeReport:
    return ModeReport(name="m", title="a | mode", cores="2", is_hand_edited=False, commands=(), runs=runs)


class TestShown:
    def test_one_run_has_no_spread(self) -> None:
        run = RunReport(iteration=0, seed=1, figures=figures(1234.5), engine_cpu_s=3.14)
        assert comparison_rows([mode_report(run)])[1] == ("a | mode", "2", "1,234", "2,469", "-", "0 of 4", "3.1")

    def test_several_runs_show_median_and_spread(self) -> None:
        runs = [RunReport(iteration=n, seed=n, figures=figures(ms, failed=n)) for n, ms in enumerate((300, 100, 200))]
        row = comparison_rows([mode_report(*runs)])[1]
        assert row[2] == "200 (100-300)"
        assert row[5] == "3 of 15"

    def test_lost_runs_are_told(self) -> None:
        lost = RunReport(iteration=0, seed=1, figures=None, failure="died")
        good = RunReport(iteration=1, seed=2, figures=figures(100))
        assert comparison_rows([mode_report(lost)])[1][2:] == ("-", "-", "-", "the run", "-")
        assert comparison_rows([mode_report(lost, lost)])[1][5] == "2 runs"
        assert comparison_rows([mode_report(lost, good)])[1][5] == "0 of 4 + 1 runs"
        assert comparison_rows([mode_report()])[1][5] == "-"

    def test_tables_line_up(self) -> None:
        rows = [("mode", "cores", "ms"), ("a | b", "2", "1,000"), ("c", "1 + 1", "2")]
        lines = table(rows).splitlines()
        assert [len(line) for line in lines] == [len(lines[0])] * 4
        marked = markdown_table(rows).splitlines()
        assert marked[1] == "| --- | --- | ---: |"
        assert marked[2] == "| a / b | 2 | 1,000 |"

    def test_a_run_in_one_line(self) -> None:
        good = RunReport(iteration=0, seed=1, figures=figures(100))
        assert run_line(good) == "TTFT mean 100 ms, p99 200 ms, 0 failed"
        lost = RunReport(iteration=0, seed=1, figures=None, failure="died\n  | a log")
        assert run_line(lost) == "failed: died"
        assert run_line(RunReport(iteration=0, seed=1, figures=None)) == "failed: for no known reason"


def test_the_question_comes_last() -> None:
    text = passage.prompt("Why?")
    assert passage.PASSAGE in text
    assert text.endswith("\n\nQuestion: Why?")

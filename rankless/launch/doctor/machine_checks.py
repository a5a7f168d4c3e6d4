"""Check a host's GPUs, shared memory, limits, memory, cores, disk, container and MPI.

GPUs are checked without CUDA: by the device files, the driver, and the CUDA version of torch.
"""

import glob
import importlib.util
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it has no stubs

from rankless.config.available_cpu_and_memory import (
    FREE_SHARED_BYTES,
    SHARED_MEMORY,
    core_count,
    list_control_group_folders,
    measure_memory,
    measure_shared_memory,
    read_limit,
)
from rankless.config.backend_and_fault_tolerance import choose_backend, read_requested_backend, require_usable_backend
from rankless.config.environment import user_visible_devices
from rankless.config.make_run_config import choose_devices
from rankless.config.shared_memory_support import GROUP_BYTES_PER_RANK, can_reserve
from rankless.errors import ConfigError
from rankless.launch.doctor.probe_protocol import CheckHost
from rankless.records.doctor_records import CheckResult, make_failure, make_pass, make_warning
from rankless.records.number_formatting import format_bytes
from rankless.torch_versions import (
    PINNED,
    SUPPORTED,
    find_objection,
    find_objection_to_python_groups,
    find_torch_version,
)

MIB = 1 << 20
RECOMMENDED_SHARED_BYTES = 512 * MIB
MIN_OPEN_FILES, RECOMMENDED_OPEN_FILES = 256, 1024
MIN_PROCESSES, RECOMMENDED_PROCESSES = 64, 1024
WORKER_MEMORY_BYTES = 512 * MIB
MIN_DISK_BYTES, RECOMMENDED_DISK_BYTES = 64 * MIB, 1024 * MIB
MPIRUN_TIMEOUT_SECONDS = 3.0
NVIDIA_SMI_TIMEOUT_SECONDS = 5.0
MIN_DRIVER_VERSIONS = {11: 450, 12: 525, 13: 580}
"""Oldest driver by CUDA major version, from NVIDIA's table of minor version compatibility (Linux)."""


def check_shared_memory() -> CheckResult:
    """Check the shared memory, in which workers compare their calls and loader workers pass batches."""
    check_name = SHARED_MEMORY
    whole, free = measure_shared_memory()
    if not whole:
        return make_pass(check_name, "does not exist: this system has shared memory elsewhere")
    seen = f"{format_bytes(free)} free of {format_bytes(whole)}"
    fix = f"as root: mount -o remount,size=8G {SHARED_MEMORY}"
    if detect_container() is not None:
        fix = "start the container with --shm-size=8g, or --ipc=host"
    if free < FREE_SHARED_BYTES:
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


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """What this host reports about its GPUs."""

    files: int = 0
    """Number of device files."""
    names: Sequence[str] | None = None
    """As `nvidia-smi` lists them; None if it is not installed."""
    driver: str = ""
    error: str = ""
    """What `nvidia-smi` printed when it failed."""
    visible: Sequence[str] | None = None
    """The devices in CUDA_VISIBLE_DEVICES; None if it is not set."""
    cuda: str | None = None
    """The CUDA version that torch was built for; None for a build without CUDA."""


def check_gpus(request: CheckHost) -> list[CheckResult]:
    """Check that the driver serves the GPUs, that torch can use them, and that enough are visible."""
    return evaluate_gpus(_collect_gpu_facts(), workers=request.workers)


def evaluate_gpus(facts: GpuFacts, *, workers: int) -> list[CheckResult]:
    """Return the results for these GPUs and this number of workers."""
    if not facts.files and (not facts.names or facts.error):
        return [_no_gpu_result(facts)]
    if facts.names is None:
        fix = "install the driver's tools to check the driver too"
        return [make_warning("GPUs", f"{facts.files} device files, but no nvidia-smi", fix)]
    if facts.error:
        fix = "load the driver (modprobe nvidia), or reboot this host if the driver was updated"
        return [make_failure("GPUs", f"nvidia-smi fails: {facts.error}", fix)]
    if not facts.files:
        fix = "start the container with --gpus all"
        return [
            make_failure("GPUs", f"the driver has {_count_names(facts.names)}, but /dev/nvidia0 does not exist", fix)
        ]
    return [_visible_devices_result(facts, facts.names, workers), _driver_result(facts)]


def read_torch_cuda_version() -> str | None:
    """Return the CUDA version that torch was built for, from its files; None for a build without CUDA."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(spec.submodule_search_locations[0]) / "version.py"
    match = re.search(r"^cuda\b.*=\s*'([\d.]+)'", file.read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else None


def _collect_gpu_facts() -> GpuFacts:
    files, visible, cuda = len(glob.glob("/dev/nvidia[0-9]*")), user_visible_devices(), read_torch_cuda_version()
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return GpuFacts(files=files, visible=visible, cuda=cuda)
    command = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as caught:
        return GpuFacts(files=files, names=(), error=str(caught), visible=visible, cuda=cuda)
    if done.returncode != 0:
        error = " ".join((done.stdout + done.stderr).split())[:200] or f"exit code {done.returncode}"
        return GpuFacts(files=files, names=(), error=error, visible=visible, cuda=cuda)
    listed = [line.rpartition(",") for line in done.stdout.splitlines() if "," in line]
    names = [name.strip() for name, _, _ in listed]
    driver = listed[0][2].strip() if listed else ""
    return GpuFacts(files=files, names=names, driver=driver, visible=visible, cuda=cuda)


def _no_gpu_result(facts: GpuFacts) -> CheckResult:
    if facts.visible:
        fix = "unset CUDA_VISIBLE_DEVICES, or start the container with --gpus all"
        return make_warning("GPUs", f"no NVIDIA GPU, but CUDA_VISIBLE_DEVICES={','.join(facts.visible)}", fix)
    built = f" (torch has CUDA {facts.cuda})" if facts.cuda else ""
    return make_pass("GPUs", f"no NVIDIA GPU: workers compute on the CPU{built}")


def _visible_devices_result(facts: GpuFacts, names: Sequence[str], workers: int) -> CheckResult:
    kinds, usable, visible = _count_names(names), len(names), facts.visible
    if visible is not None:
        kinds += f"; CUDA_VISIBLE_DEVICES={','.join(visible) or 'none'}"
        usable = len(visible)
        absent = [name for name in visible if name.isdigit() and int(name) >= len(names)]
        twice = [name for name in visible if visible.count(name) > 1]
        if absent or twice:
            wrong = f"device {absent[0]} does not exist" if absent else f"device {twice[0]} is listed twice"
            fix = f"set it to different numbers below {len(names)}, or unset it"
            return make_failure("GPUs", f"{kinds}: {wrong}", fix)
    if not usable:
        return make_warning("GPUs", f"{kinds}: all GPUs are hidden", "unset CUDA_VISIBLE_DEVICES to compute on them")
    if workers > usable:
        fix = "start one worker per GPU, or compute on the CPU with --devices cpu"
        return make_warning(
            "GPUs", f"{kinds}: {workers} workers would share {usable}, and communicate through Gloo", fix
        )
    return make_pass("GPUs", kinds)


def _driver_result(facts: GpuFacts) -> CheckResult:
    if facts.cuda is None:
        fix = "install a build of torch with CUDA, or set --devices cpu"
        return make_warning("driver", f"{facts.driver}, but torch is missing or built without CUDA", fix)
    oldest = MIN_DRIVER_VERSIONS.get(int(facts.cuda.partition(".")[0]))
    first = facts.driver.partition(".")[0]
    if oldest is not None and first.isdigit() and int(first) < oldest:
        fix = f"install driver {oldest} or newer, or a build of torch for an older CUDA"
        return make_failure("driver", f"{facts.driver}, too old for torch's CUDA {facts.cuda}", fix)
    return make_pass("driver", f"{facts.driver}, for torch's CUDA {facts.cuda}")


def _count_names(names: Sequence[str]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))

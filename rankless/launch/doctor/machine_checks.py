"""Looking at a host: its shared memory, limits, memory, cores, disk, container, MPI."""

import os
import resource
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it has no stubs

from rankless.config.validation import core_count
from rankless.launch.doctor.probe_protocol import Look
from rankless.records.check_results import Row, failed, passed, warned
from rankless.records.quantities import sized

MIB = 1 << 20
SHARED_MEMORY = "/dev/shm"
LEAST_SHARED, ENOUGH_SHARED = 16 * MIB, 512 * MIB
LEAST_FILES, ENOUGH_FILES = 256, 1024
LEAST_PROCESSES, ENOUGH_PROCESSES = 64, 1024
WORKER_MEMORY = 512 * MIB
LEAST_DISK, ENOUGH_DISK = 64 * MIB, 1024 * MIB
MOST_MPI_SECONDS = 3.0
_GROUPS = Path("/sys/fs/cgroup")


def shared_memory() -> Row:
    """Where workers compare their calls, and loaders' readers hand over batches."""
    what = SHARED_MEMORY
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return passed(what, "not there: this system has shared memory elsewhere")
    whole, free = found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail
    seen = f"{sized(free)} free of {sized(whole)}"
    fix = f"as root: mount -o remount,size=8G {SHARED_MEMORY}"
    if container() is not None:
        fix = "start the container with --shm-size=8g, or --ipc=host"
    if free < LEAST_SHARED:
        return failed(what, f"{seen}: batches that readers hand over do not fit", fix)
    return (
        warned(what, f"{seen}: little for loaders with readers", fix) if whole < ENOUGH_SHARED else passed(what, seen)
    )


def open_files() -> Row:
    """How many files and connections a process may have."""
    what = "open files"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH_FILES:
        return passed(what, f"{_limit(soft)} for each process")
    seen = f"{soft} for each process, {_limit(hard)} if asked for"
    higher = 65536 if hard == resource.RLIM_INFINITY else hard
    fix = f"ulimit -n {higher}, before the start; for logins by ssh: nofile in /etc/security/limits.conf"
    if hard != resource.RLIM_INFINITY and hard < ENOUGH_FILES:
        fix = "as root: ulimit -n 65536; for logins by ssh: nofile in /etc/security/limits.conf"
    return failed(what, seen, fix) if soft < LEAST_FILES else warned(what, seen, fix)


def locked_memory() -> Row:
    """How much memory may be pinned, which InfiniBand needs."""
    what = "locked memory"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    cards = sorted(os.listdir("/sys/class/infiniband")) if os.path.isdir("/sys/class/infiniband") else []
    seen = _limit(soft) if soft == resource.RLIM_INFINITY else sized(soft)
    if not cards:
        return passed(what, f"{seen}; only InfiniBand needs it, and there is none")
    if soft == resource.RLIM_INFINITY:
        return passed(what, f"{seen}, as {', '.join(cards)} needs")
    return warned(
        what,
        f"{seen}, but {', '.join(cards)} needs more",
        "ulimit -l unlimited; for logins by ssh: memlock in /etc/security/limits.conf; containers: --ulimit memlock=-1",
    )


def processes() -> Row:
    """How many processes and threads may be started."""
    what = "processes"
    limits = [_number(group / "pids.max") for group in _groups("pids")]
    if os.geteuid() != 0:  # root has no limit of its own
        limits.append(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    finite = [limit for limit in limits if limit is not None and limit != resource.RLIM_INFINITY]
    if not finite:
        return passed(what, "no limit")
    room = min(finite)
    with suppress(OSError, psutil.Error):
        room -= sum(each.info["num_threads"] or 1 for each in _own_processes())
    seen = f"room for {max(0, room)} more of {min(finite)}, threads among them"
    fix = "end what is not needed; ulimit -u, nproc in /etc/security/limits.conf, or --pids-limit of the container"
    if room < LEAST_PROCESSES:
        return failed(what, seen, fix)
    return warned(what, seen, fix) if room < ENOUGH_PROCESSES else passed(what, seen)


def memory(look: Look) -> Row:
    """Whether the workers' processes fit, models and data apart."""
    what = "memory"
    machine = psutil.virtual_memory()
    free, whole, where = machine.available, machine.total, ""
    for group in _groups("memory"):
        limit = _number(group / "memory.max") or _number(group / "memory.limit_in_bytes")
        used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes") or 0
        if limit is not None and limit < whole:
            free, whole, where = max(0, min(free, limit - used)), limit, ", which the control group allows"
    seen = f"{sized(free)} free of {sized(whole)}{where}"
    if free < look.workers * WORKER_MEMORY:
        wanted = sized(look.workers * WORKER_MEMORY)
        return warned(what, f"{seen}; {look.workers} workers want {wanted} before any model", "start fewer workers")
    return passed(what, seen)


def cores(look: Look) -> Row:
    """Whether every worker has a core."""
    what = "cores"
    allowed, there = core_count(), os.cpu_count() or 1
    seen = f"{allowed} of {there} may be used" if allowed != there else f"{there}, all may be used"
    quota = _quota()
    if quota is not None and quota < allowed:
        seen += f", for {quota:.3g} cores' time: the control group allows no more"
        if quota < allowed / 2:
            threads = max(1, int(quota / look.workers))
            fix = f"give --threads {threads}, for more are held up; or allow more time (--cpus of the container)"
            return warned(what, seen, fix)
    if look.workers > allowed:
        return warned(what, f"{seen}, for {look.workers} workers", "start as many workers as there are cores, or fewer")
    return passed(what, seen)


def disk(look: Look) -> Row:
    """Whether logs can be written."""
    what = "disk for logs"
    folder = Path(look.log_folder).absolute()
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        return failed(what, f"{there} may not be written to", "give --log-dir a folder of your own")
    free = shutil.disk_usage(there).free
    seen, fix = f"{sized(free)} free at {there}", "make room, or give --log-dir another folder"
    if free < LEAST_DISK:
        return failed(what, seen, fix)
    return warned(what, seen, fix) if free < ENOUGH_DISK else passed(what, seen)


def mpi() -> Row:
    """Which MPI there is: Rankless needs none."""
    what = "MPI"
    path = shutil.which("mpirun")
    if path is None:
        return passed(what, "none, and none is needed")
    version = "version unknown"
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=MOST_MPI_SECONDS)
        version = next(iter((done.stdout or done.stderr).strip().splitlines()), version)
    return passed(what, f"{version} ({path}); none is needed")


def surroundings() -> Row:
    """Whether this is a container, which has a network of its own unless it is told not to."""
    found = container()
    return passed("container", "none" if found is None else f"yes, {found}")


def container() -> str | None:
    """What kind of container this host is, if it is one."""
    if os.path.exists("/.dockerenv"):
        return "Docker"
    if os.path.exists("/run/.containerenv"):
        return "Podman"
    with suppress(OSError):
        groups = Path("/proc/1/cgroup").read_text(encoding="utf-8")
        signs = {"kubepods": "Kubernetes", "docker": "Docker", "lxc": "LXC", "containerd": "containerd"}
        return next((name for sign, name in signs.items() if sign in groups), None)
    return None


def _own_processes() -> list[psutil.Process]:
    own = os.geteuid()
    found = psutil.process_iter(["uids", "num_threads"])
    return [each for each in found if each.info["uids"] is not None and each.info["uids"].real == own]


def _quota() -> float | None:
    """How many cores' time the control group allows."""
    found = []
    for group in _groups("cpu"):
        with suppress(OSError, ValueError):
            words = (group / "cpu.max").read_text(encoding="utf-8").split()
            found += [] if words[0] == "max" else [int(words[0]) / int(words[1])]
        allowed, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        found += [allowed / period] if allowed and period and allowed > 0 else []
    return min(found, default=None)


def _groups(controller: str) -> list[Path]:
    """The folders of this process's control group and those around it, in both versions of Linux's control groups."""
    folders = []
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            number, controllers, path = line.split(":", 2)
            if number != "0" and controller not in controllers.split(","):
                continue
            root = _GROUPS if number == "0" else _GROUPS / controller
            own = root / path.lstrip("/")
            folders += [own, *(each for each in own.parents if each.is_relative_to(root))]
    return folders


def _number(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(path.read_text(encoding="utf-8"))
    return None


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)

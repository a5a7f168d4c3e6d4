"""The cores and the memory that this process may use, also within the limits of its control group. No torch."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it has no stubs

from rankless.records.number_formatting import format_bytes

SHARED_MEMORY = "/dev/shm"
LITTLE_SHARED_BYTES, FREE_SHARED_BYTES = 64 << 20, 16 << 20
"""A file system of at most so much shared memory, or with less than so much free, is too small for batches."""
_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Memory:
    """The memory that this process may use, in bytes."""

    free: int
    whole: int
    is_limited: bool
    """Whether a control group allows less than the machine has, as in a container."""


def core_count() -> int:
    """Return the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def measure_memory() -> Memory:
    """Return how much memory this process may still use: of the machine, or of its control group if that is less."""
    machine = psutil.virtual_memory()
    found = Memory(machine.available, machine.total, is_limited=False)
    for group in list_control_group_folders("memory"):
        limit = read_limit(group / "memory.max") or read_limit(group / "memory.limit_in_bytes")
        used = read_limit(group / "memory.current") or read_limit(group / "memory.usage_in_bytes") or 0
        if limit is not None and limit < found.whole:
            free = limit - used + _count_unused_file_bytes(group)
            found = Memory(max(0, min(found.free, free)), limit, is_limited=True)
    return found


def describe_little_shared_memory(root: str = "") -> str:
    """Return the size of the shared memory as a clause if it is small or nearly full; "" if not.

    Args:
        root: The root folder as another process sees it, such as "/proc/123/root".
    """
    whole, free = measure_shared_memory(root)
    return describe_shared_memory(root) if whole <= LITTLE_SHARED_BYTES or free < FREE_SHARED_BYTES else ""


def describe_shared_memory(root: str = "") -> str:
    """Return the size of the shared memory as a clause; "" if this system has none at that place."""
    whole, free = measure_shared_memory(root)
    size = f"{format_bytes(whole)}, {format_bytes(free)} of them free"
    return f"{SHARED_MEMORY}, through which DataLoader workers send batches, has {size}" if whole else ""


def measure_shared_memory(root: str = "") -> tuple[int, int]:
    """Return the size of the shared memory and how much of it is free, in bytes; 0 without any."""
    try:
        found = os.statvfs(root + SHARED_MEMORY)
    except OSError:
        return 0, 0
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail


def _count_unused_file_bytes(group: Path) -> int:
    """Return how much of a control group's used memory keeps contents of files that the kernel gives up on demand."""
    with suppress(OSError, ValueError):
        statistics = dict(line.split() for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines())
        return int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))
    return 0


def list_control_group_folders(controller: str) -> list[Path]:
    """Return the folders of this process's control group and its ancestors, for cgroup versions 1 and 2."""
    folders = []
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            number, controllers, path = line.split(":", 2)
            if number != "0" and controller not in controllers.split(","):
                continue
            root = _ROOT if number == "0" else _ROOT / controller
            own = root / path.lstrip("/")
            folders += [own, *(each for each in own.parents if each.is_relative_to(root))]
    return folders


def read_limit(path: Path) -> int | None:
    """Return the number in a file of a control group; None if there is none, as for "max"."""
    with suppress(OSError, ValueError):
        return int(path.read_text(encoding="utf-8"))
    return None

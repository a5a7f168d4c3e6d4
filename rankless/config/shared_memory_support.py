"""Whether processes of this machine can run collectives in memory that they share. Imports no torch."""

import errno
import os
import platform
import tempfile
from contextlib import suppress
from dataclasses import dataclass

from rankless.config.available_cpu_and_memory import measure_memory
from rankless.torch_versions import find_objection_to_python_groups, find_torch_version

GROUP_BYTES_PER_RANK = 4 << 20
"""A group of up to 64 ranks takes at most so much memory for each of them."""
_FUTEX_NUMBERS = {
    "x86_64": 202,
    "amd64": 202,
    "aarch64": 98,
    "arm64": 98,
    "riscv64": 98,
    "ppc64le": 221,
    "s390x": 238,
}


@dataclass(frozen=True)
class Support:
    """The answer of `is_supported`. It is true if there is no reason against it."""

    reason: str
    """Why collectives in shared memory cannot be used; "" if they can."""

    def __bool__(self) -> bool:
        return not self.reason


def is_supported() -> Support:
    """Return whether this machine and its PyTorch can run collectives in shared memory, with the reason if not.

    Example:
        >>> bool(is_supported()) == (is_supported().reason == "")
        True
    """
    if platform.system() != "Linux":
        return Support(f"it needs Linux's futex and shared memory, and this is {platform.system()}")
    if objection := find_objection_to_python_groups(find_torch_version()):
        return Support(objection)
    if not has_ordered_stores():
        return Support(f"it needs a processor whose stores arrive in order (x86-64), and this is {platform.machine()}")
    if find_futex_number() is None:
        return Support(f"the number of the system call futex is not known for {platform.machine()}")
    return Support("")


def has_ordered_stores() -> bool:
    """Return whether the cores of this machine see each other's stores in order."""
    return platform.machine().lower() in ("x86_64", "amd64")


def find_futex_number() -> int | None:
    """Return the number of the system call `futex` on this machine; None if it is not known, or not Linux."""
    return _FUTEX_NUMBERS.get(platform.machine().lower()) if platform.system() == "Linux" else None


def can_reserve(byte_count: int) -> bool:
    """Return whether this process can reserve so much memory to share: an anonymous file, or a file in /dev/shm."""
    if hasattr(os, "memfd_create"):
        with suppress(OSError):
            descriptor = os.memfd_create("rankless-check", os.MFD_CLOEXEC)
            try:
                reserve(descriptor, byte_count)
                return True
            finally:
                os.close(descriptor)
    with suppress(OSError), tempfile.TemporaryFile(dir="/dev/shm") as file:
        reserve(file.fileno(), byte_count)
        return True
    return False


def reserve(descriptor: int, byte_count: int) -> None:
    """Reserve the memory of a file: otherwise a write to the mapped file could kill the process.

    Raises:
        OSError: There is not so much memory.
    """
    # The kernel would give an anonymous file all memory that there is, and then end some process.
    if byte_count > measure_memory().free:
        raise OSError(errno.ENOMEM, f"less memory is free than {byte_count:,} bytes")
    os.ftruncate(descriptor, byte_count)
    os.posix_fallocate(descriptor, 0, byte_count)

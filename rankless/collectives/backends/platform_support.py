"""Whether processes of this machine can use collectives in shared memory."""

import os
import platform
from dataclasses import dataclass

from rankless.collectives.backends.futex import find_syscall_number


@dataclass(frozen=True)
class Support:
    """The answer of `is_supported`. It is true if there is no reason against it."""

    reason: str
    """Why collectives in shared memory cannot be used; "" if they can."""

    def __bool__(self) -> bool:
        return not self.reason


def is_supported() -> Support:
    """Return whether this machine can run collectives in shared memory, with the reason if it cannot.

    Example:
        >>> bool(is_supported()) == (is_supported().reason == "")
        True
    """
    if platform.system() != "Linux":
        return Support(f"it needs Linux's futex and shared memory, and this is {platform.system()}")
    if not has_ordered_stores():
        return Support(f"it needs a processor whose stores arrive in order (x86-64), and this is {platform.machine()}")
    if find_syscall_number() is None:
        return Support(f"the number of the system call futex is not known for {platform.machine()}")
    return Support("")


def has_ordered_stores() -> bool:
    """Return whether the cores of this machine see each other's stores in order."""
    return platform.machine().lower() in ("x86_64", "amd64")


def count_cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0))

"""Memory that the processes of one host share."""

import os
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

from rankless.config.shared_memory_support import reserve


def create_shared_file(size: int) -> str:
    """Create a file of that size with all its memory reserved, and return its path; "" if there is no memory."""
    for folder in ("/dev/shm", None):
        with suppress(OSError):
            descriptor, path = tempfile.mkstemp(prefix="rankless-shared-", dir=folder)
            try:
                reserve(descriptor, size)
                return path
            except OSError:
                os.unlink(path)
            finally:
                os.close(descriptor)
    return ""


def host_identity() -> str:
    """Return a text that two processes have in common only if they share memory and process ids.

    It names the running kernel, and the container's shared memory and process namespace.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/dev/shm').st_dev} {os.readlink('/proc/self/ns/pid')}"
    return f"{uuid.getnode()}"

"""Memory that the processes of one host share."""

import os
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path


def create_shared_file(size: int) -> str:
    """The path of a new file of that size, all its memory reserved; empty if there is none to be had."""
    for folder in ("/dev/shm", None):
        with suppress(OSError):
            descriptor, path = tempfile.mkstemp(prefix="rankless-shared-", dir=folder)
            try:
                # Writing to a mapped file for which there is no room would kill the process.
                os.write(descriptor, bytes(size))
                return path
            except OSError:
                os.unlink(path)
            finally:
                os.close(descriptor)
    return ""


def host_identity() -> str:
    """What two processes have in common only if they share memory and process numbers: the running kernel, and the
    container's memory and numbers.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/dev/shm').st_dev} {os.readlink('/proc/self/ns/pid')}"
    return f"{uuid.getnode()}"

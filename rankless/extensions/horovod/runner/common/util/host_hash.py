"""A name for this machine, equal in all processes that share its memory."""

import hashlib
import os
import socket


def host_hash(salt: str | None = None) -> str:
    """Return the host name with a hash of it, of the network namespace, and of the salt."""
    hostname = socket.gethostname()
    try:
        namespace = os.readlink("/proc/self/ns/net")
    except OSError:
        namespace = ""
    text = "-".join([hostname, namespace, salt or ""])
    return f"{hostname.partition('.')[0]}-{hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()}"

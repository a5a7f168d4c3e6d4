"""Memory that all ranks of a group map, and how they find it.

Rank 0 creates it as an anonymous file (memfd). Each other rank opens rank 0's descriptor in `/proc`, or receives it
over a Unix socket (SCM_RIGHTS) where `/proc` is closed. Without anonymous files, rank 0 creates a file that has a name
until all ranks have mapped it.
"""

import json
import mmap
import os
import socket
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Literal

import torch

from rankless.collectives.backends.store_exchange import StoreExchange
from rankless.collectives.shared_memory_file import create_shared_file, host_identity
from rankless.config.shared_memory_support import reserve
from rankless.records.private_files import is_own_user

Way = Literal["proc", "socket", "file"]
WAYS: tuple[Way, ...] = ("proc", "socket", "file")
_ACCEPT_SECONDS = 0.05
_CONNECT_SECONDS = 10.0


class SharedRegion:
    """Mapped memory of a group.

    It lives until the last tensor on it and this object are gone; nobody has to unmap it.

    Args:
        descriptor: An open file of at least `byte_count` bytes. The caller closes it.
        byte_count: The number of bytes to map.
    """

    def __init__(self, descriptor: int, byte_count: int) -> None:
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self.memory = mmap.mmap(descriptor, byte_count, flags=flags)
        with torch.inference_mode(False):
            self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()

    def view_words(self, start: int, end: int) -> memoryview:
        """Return the bytes from `start` to `end` as 64-bit words; both are multiples of 8."""
        return memoryview(self.memory)[start:end].cast("Q")


def open_shared_region(exchange: StoreExchange, byte_count: int, ways: Sequence[Way] = WAYS) -> SharedRegion | None:
    """Map new memory that the ranks of an exchange share.

    Args:
        exchange: Connects the ranks, which all call this. It must not have been used for another region.
        byte_count: The size, equal on all ranks.
        ways: How the memory may be passed on. Default: all ways.

    Returns:
        The region, filled with zeros. None on all ranks if rank 0 has no memory, or if a rank cannot map it.

    Raises:
        CollectiveError: A rank does not call this within the exchange's timeout.
    """
    with ExitStack() as resources:
        if exchange.rank == 0:
            descriptor = _share(exchange, byte_count, ways, resources)
        else:
            descriptor = _receive(exchange, ways, resources)
        region = None
        if descriptor is not None:
            with suppress(OSError, ValueError):
                region = SharedRegion(descriptor, byte_count)
        results = exchange.gather("mapped", "" if region is None else "yes")
    return region if all(results) else None


def _share(exchange: StoreExchange, byte_count: int, ways: Sequence[Way], resources: ExitStack) -> int | None:
    """Create the memory on rank 0, and pass it on. Returns its descriptor, which the resources close."""
    descriptor, path = _create(byte_count, ways)
    if descriptor is not None:
        resources.callback(os.close, descriptor)
    if path:
        # All ranks have opened the file when the resources are released.
        resources.callback(_unlink, path)
    listener = _listen(resources) if "socket" in ways and descriptor is not None and not path else None
    offer = {
        "host": host_identity(),
        "process": os.getpid(),
        "descriptor": descriptor,
        "file": list(_file_number(descriptor)) if descriptor is not None else None,
        "path": path,
        "socket": listener.getsockname().hex() if listener is not None else "",
    }
    exchange.publish("offer", json.dumps(offer))
    asking = sum(exchange.wait_for("received", rank) == "socket" for rank in range(1, exchange.size))
    if listener is not None and descriptor is not None:
        _send_descriptor(listener, descriptor, asking, exchange)
    return descriptor


def _create(byte_count: int, ways: Sequence[Way]) -> tuple[int | None, str]:
    """Return a descriptor of new memory, and its path or ""; None if there is no memory."""
    if ("proc" in ways or "socket" in ways) and hasattr(os, "memfd_create"):
        with suppress(OSError):
            descriptor = os.memfd_create("rankless-collectives", os.MFD_CLOEXEC)
            try:
                reserve(descriptor, byte_count)
                return descriptor, ""
            except OSError:
                os.close(descriptor)
    if "file" in ways and (path := create_shared_file(byte_count)):
        return os.open(path, os.O_RDWR | os.O_CLOEXEC), path
    return None, ""


def _receive(exchange: StoreExchange, ways: Sequence[Way], resources: ExitStack) -> int | None:
    """Return a descriptor of rank 0's memory, which the resources close; None without one."""
    offer = json.loads(exchange.wait_for("offer", 0))
    descriptor = None
    if offer["descriptor"] is not None and offer["host"] == host_identity():
        if offer["path"] or "proc" in ways:
            path = offer["path"] or f"/proc/{offer['process']}/fd/{offer['descriptor']}"
            descriptor = _open_same_file(path, offer["file"])
        if descriptor is None and offer["socket"]:
            exchange.publish("received", "socket")
            descriptor = _receive_descriptor(bytes.fromhex(offer["socket"]))
            if descriptor is not None:
                resources.callback(os.close, descriptor)
            return descriptor
    exchange.publish("received", "")
    if descriptor is not None:
        resources.callback(os.close, descriptor)
    return descriptor


def _open_same_file(path: str, file: Sequence[int]) -> int | None:
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if list(_file_number(descriptor)) == list(file):
            return descriptor
        os.close(descriptor)
    return None


def _file_number(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _unlink(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)


def _listen(resources: ExitStack) -> socket.socket | None:
    """Return a listening Unix socket with a name that is in no folder."""
    with suppress(OSError):
        listener = resources.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(f"\0rankless-{uuid.uuid4().hex}".encode())
        listener.listen(128)
        listener.settimeout(_ACCEPT_SECONDS)
        return listener
    return None


def _send_descriptor(listener: socket.socket, descriptor: int, count: int, exchange: StoreExchange) -> None:
    """Send the descriptor to `count` processes of this user. Ends early if a rank ends or its timeout passes."""
    attempts = int(_CONNECT_SECONDS / _ACCEPT_SECONDS)
    while count and attempts:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            attempts -= 1
            exchange.check()
            continue
        with connection, suppress(OSError):
            if is_own_user(connection):
                socket.send_fds(connection, [b"."], [descriptor])
                count -= 1


def _receive_descriptor(name: bytes) -> int | None:
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_CONNECT_SECONDS)
        connection.connect(name)
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        if descriptors:
            return descriptors[0]
    return None

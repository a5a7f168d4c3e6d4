"""The socket of a server, over which workers reach it: no second server takes over its address."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import zmq

from rankless.errors import ServerError
from rankless.extensions.servers.service.wire.messages import COPIED_BYTES, MOST_MESSAGE_BYTES

_IPC = "ipc://"


@contextlib.contextmanager
def bound(socket: "zmq.Socket[bytes]", address: str) -> Iterator[str]:
    """Bind a socket within the context, and yield its address, with the real port.

    A second bind to the path of a live server would succeed, and take its connections. A lock beside the path prevents
    it, which the kernel releases when a process ends in any way.

    Raises:
        ServerError: Another server has the address, or it cannot be used.
    """
    with _locked(address):
        socket.set(zmq.IPV6, int("[" in address))
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise _unusable(address, error.strerror or str(error)) from None
        real = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        try:
            yield real
        finally:
            with contextlib.suppress(zmq.ZMQError):  # the socket may be closed
                socket.unbind(real)
            if path := _path_of(address):
                path.unlink(missing_ok=True)


def _path_of(address: str) -> Path | None:
    """Return the path of an `ipc` address, or None for others, also in Linux's abstract namespace."""
    name = address.removeprefix(_IPC)
    return Path(name) if address.startswith(_IPC) and not name.startswith("@") else None


@contextlib.contextmanager
def _locked(address: str) -> Iterator[None]:
    path = _path_of(address)
    if path is None:  # the kernel refuses a second bind
        yield
        return
    lock_path = path.with_name(path.name + ".lock")
    try:
        descriptor = _lock(lock_path)
    except OSError as error:
        in_use = error.errno in (errno.EWOULDBLOCK, errno.EACCES) and lock_path.exists()
        raise _unusable(address, "another server has it" if in_use else str(error)) from None
    try:
        yield
    finally:
        lock_path.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(path: Path) -> int:
    """Return a descriptor that holds the lock of the file that is at the path now."""
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        # A server that ends removes the file. A lock of the removed one protects nothing.
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)


def _unusable(address: str, found: str) -> ServerError:
    return ServerError(
        expected=f"to serve at {address}", found=found, fix="end the other server, or use another address"
    )


_MOST_QUEUED = 64
"""Messages of one connection that wait to be received or sent. The kernel's buffers hold more."""


class ServerSocket:
    """A ROUTER socket, which gives each connection an identity that no other one can choose."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        """Bound what a connection can hold, and notice when its other end is gone."""
        self._socket = socket
        socket.set(zmq.MAXMSGSIZE, MOST_MESSAGE_BYTES)
        socket.set(zmq.RCVHWM, _MOST_QUEUED)
        socket.set(zmq.SNDHWM, _MOST_QUEUED)
        socket.set(zmq.ROUTER_MANDATORY, 1)  # otherwise answers beyond the limit would vanish
        socket.set(zmq.ROUTER_HANDOVER, 0)
        socket.set(zmq.HEARTBEAT_IVL, 5000)
        socket.set(zmq.HEARTBEAT_TIMEOUT, 30000)
        socket.set(zmq.LINGER, 2000)
        socket.copy_threshold = COPIED_BYTES

    def receive(self, take: Callable[[bytes, Sequence[memoryview]], None]) -> bool:
        """Give one message and the identity of its connection to a function. Return whether a message was there."""
        try:
            identity, *frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return False
        take(identity.bytes, [frame.buffer for frame in frames])
        return True

    def send(self, identity: bytes, frames: Sequence[bytes | memoryview]) -> bool:
        """Send a message to a connection. Return whether it could be sent."""
        try:
            self._socket.send_multipart([identity, *frames], zmq.DONTWAIT, copy=False)
        except zmq.ZMQError:
            return False
        return True

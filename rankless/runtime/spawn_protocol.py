"""The messages that start processes, with the file descriptors that each process inherits.

The agent asks the fork server pool for a fork server, asks a fork server for one more worker of an elastic job, and
tells a fork server over its control pipe to signal or end its workers.
"""

import contextlib
import socket
from collections.abc import Iterator

import msgspec

from rankless.config.worker_config import HostConfig, WorkerLaunch
from rankless.records.framing import FrameFormat

READY = b"R"
"""Said once by the fork server, when it has imported all."""
MOST_DESCRIPTORS = 253
"""What Linux passes with one message."""
_CONFIG_FRAME = FrameFormat(">Q")
_PROCESS_ID_BYTES = 8
KILL = b"K"
"""End everything at once, as when the lifeline ends."""

CUT = b"C"
"""Shut down the workers' connections to other ranks: who waits in one raises."""

_SIGNAL = 0x80
MAX_LAUNCH_BYTES = 1 << 18


def send_host_config(server: socket.socket, config: HostConfig, descriptors: list[int]) -> None:
    """Ask for a warm parent that has this plan and these descriptors."""
    text = msgspec.json.encode(config)
    socket.send_fds(server, [_CONFIG_FRAME.pack_header(len(text))], descriptors)
    server.sendall(text)


def receive_host_config(agent: socket.socket) -> tuple[HostConfig, list[int]] | None:
    """A plan, and descriptors as they are numbered here; None once there will be no other."""
    header_bytes = _CONFIG_FRAME.header_bytes
    header, descriptors, _flags, _address = socket.recv_fds(agent, header_bytes, MOST_DESCRIPTORS, socket.MSG_WAITALL)
    if len(header) < header_bytes:
        return None
    (length,) = _CONFIG_FRAME.unpack_header(header)
    text = agent.recv(length, socket.MSG_WAITALL)
    return msgspec.json.decode(text, type=HostConfig), descriptors


def send_process_id(agent: socket.socket, process_id: int) -> None:
    """Tell the id of the process that was asked for."""
    agent.sendall(process_id.to_bytes(_PROCESS_ID_BYTES))


def receive_process_id(server: socket.socket) -> int | None:
    """The new process's id; None if the fork server has gone."""
    with contextlib.suppress(OSError):
        number = server.recv(_PROCESS_ID_BYTES, socket.MSG_WAITALL)
        return int.from_bytes(number) if len(number) == _PROCESS_ID_BYTES else None
    return None


def encode_signal(number: int) -> bytes:
    """Send the workers signal `number`."""
    return bytes([_SIGNAL | number])


def decode_signals(words: bytes) -> Iterator[int]:
    """The numbers of the signals that the workers are to be sent."""
    return (word & ~_SIGNAL for word in words if word & _SIGNAL)


def send_worker_launch(
    orders: socket.socket, launch: WorkerLaunch, words: socket.socket, *, page: int | None = None
) -> None:
    """Order a worker, which gets `words`, and writes on `page` where it is. Raises OSError if the parent is gone."""
    descriptors = [words.fileno()] if page is None else [words.fileno(), page]
    socket.send_fds(orders, [msgspec.json.encode(launch)], descriptors)


def receive_worker_launch(orders: socket.socket) -> WorkerLaunch | None:
    """The next worker that is ordered; None once there will be none. Raises BlockingIOError if there is none yet."""
    try:
        data, descriptors, _flags, _address = socket.recv_fds(orders, MAX_LAUNCH_BYTES, 2)
    except ConnectionError:
        return None
    if not data:
        return None
    launch = msgspec.json.decode(data, type=WorkerLaunch)
    words, page = (*descriptors, None)[:2]
    told = msgspec.structs.replace(launch.config, rounds_descriptor=words, status_descriptor=page)
    return msgspec.structs.replace(launch, config=told)

"""The messages that start processes, with the file descriptors that each process inherits.

The agent asks the fork server pool for a fork server, and asks a fork server for one more worker of an elastic job.
Over the control pipe it has a fork server signal or end its workers. The process that calls `rankless.spawn` asks a
server of its own.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator

import msgspec

from rankless.config.process_configs import HostConfig, WorkerLaunch
from rankless.records.encoding import encode_json
from rankless.records.framing import FrameFormat, receive_message

READY = b"R"
"""The pool sends this once, when it has imported everything."""
MAX_DESCRIPTORS = 253
"""How many descriptors Linux passes with one message."""
_CONFIG_FRAME = FrameFormat(">Q")
_CALL_FRAME = FrameFormat("<Q")
FORK = b"F"
"""The message with which `rankless.spawn` asks its server for a process; descriptors come with it."""
_FORK_DESCRIPTORS = 5
_NUMBER = struct.Struct("<q")
_PROCESS_ID_BYTES = 8
KILL = b"K"
"""Command on the control pipe: end everything at once, as at its end of file."""

CUT = b"C"
"""Command on the control pipe: shut down the workers' connections to other ranks, so that waiting collectives raise."""

ADOPT = b"A"
"""Command on the control pipe: another process has forked a worker. Its rank and its process id follow."""

_ADOPTED = struct.Struct("<iq")
_SIGNAL = 0x80
MAX_LAUNCH_BYTES = 1 << 18


def send_host_config(pool: socket.socket, config: HostConfig, descriptors: list[int]) -> None:
    """Ask the pool for a fork server with this config and these descriptors."""
    text = encode_json(config)
    socket.send_fds(pool, [_CONFIG_FRAME.pack_header(len(text))], descriptors)
    pool.sendall(text)


def receive_host_config(agent: socket.socket) -> tuple[HostConfig, list[int]] | None:
    """Receive a config, and descriptors under their numbers in this process. Returns None if the agent is gone."""
    header_bytes = _CONFIG_FRAME.header_bytes
    header, descriptors, _flags, _address = socket.recv_fds(agent, header_bytes, MAX_DESCRIPTORS, socket.MSG_WAITALL)
    if len(header) < header_bytes:
        return None
    (length,) = _CONFIG_FRAME.unpack_header(header)
    text = agent.recv(length, socket.MSG_WAITALL)
    return msgspec.json.decode(text, type=HostConfig), descriptors


def send_process_id(agent: socket.socket, process_id: int) -> None:
    """Send the agent the process id of the fork server that it asked for."""
    agent.sendall(process_id.to_bytes(_PROCESS_ID_BYTES))


def receive_process_id(pool: socket.socket) -> int | None:
    """Receive the process id of the new fork server. Returns None if the pool is gone."""
    with contextlib.suppress(OSError):
        number = pool.recv(_PROCESS_ID_BYTES, socket.MSG_WAITALL)
        return int.from_bytes(number) if len(number) == _PROCESS_ID_BYTES else None
    return None


def encode_signal(number: int) -> bytes:
    """Return the command on the control pipe that sends the workers signal `number`."""
    return bytes([_SIGNAL | number])


def encode_adoption(rank: int, process_id: int) -> bytes:
    """Return the command on the control pipe that tells of a worker that another one has forked."""
    return ADOPT + _ADOPTED.pack(rank, process_id)


def split_adoptions(commands: bytes) -> tuple[list[tuple[int, int]], bytes]:
    """Return rank and process id of each worker that another one has forked, and the other commands."""
    adopted, others, place = list[tuple[int, int]](), b"", 0
    while place < len(commands):
        if commands[place : place + 1] == ADOPT:
            adopted.append(_ADOPTED.unpack_from(commands, place + 1))
            place += _ADOPTED.size
        else:
            others += commands[place : place + 1]
        place += 1
    return adopted, others


def decode_signals(commands: bytes) -> Iterator[int]:
    """Return the signal numbers among some commands."""
    return (command & ~_SIGNAL for command in commands if command & _SIGNAL)


def send_worker_launch(
    launches: socket.socket, launch: WorkerLaunch, rounds: socket.socket, *, page: int | None = None
) -> None:
    """Ask a fork server for one more worker. Raises OSError if the fork server is gone.

    Args:
        launches: The socket to the fork server.
        launch: What to start.
        rounds: The worker's end of its channel to the elastic driver.
        page: The descriptor of the page in which the worker publishes its status.
    """
    descriptors = [rounds.fileno()] if page is None else [rounds.fileno(), page]
    socket.send_fds(launches, [encode_json(launch)], descriptors)


def receive_worker_launch(launches: socket.socket) -> WorkerLaunch | None:
    """Receive the next worker to start. Returns None at the end; raises BlockingIOError if there is none yet."""
    try:
        data, descriptors, _flags, _address = socket.recv_fds(launches, MAX_LAUNCH_BYTES, 2)
    except ConnectionError:
        return None
    if not data:
        return None
    launch = msgspec.json.decode(data, type=WorkerLaunch)
    rounds, page = (*descriptors, None)[:2]
    config = msgspec.structs.replace(launch.config, rounds_descriptor=rounds, status_descriptor=page)
    return msgspec.structs.replace(launch, config=config)


class SpawnedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """All that a process of `rankless.spawn` needs before it receives its function."""

    rank: int
    count: int
    title: str
    """The script and the function, for the title of the process."""
    environment: dict[str, str]
    cores: list[int] | None
    """The CPU cores that it may use; None if the system does not tell."""


def send_call(channel: socket.socket, data: bytes) -> None:
    """Write one message between the caller of `rankless.spawn` and a process: settings, a call, or an outcome."""
    channel.sendall(_CALL_FRAME.encode(data))


def receive_call(channel: socket.socket) -> bytes | None:
    """Read one message of `send_call`. Returns None if the other end is gone."""
    return receive_message(channel, _CALL_FRAME)


def ask_for_process(
    control: socket.socket, *, channel: int, status: int, folder: int, output: int, errors: int
) -> None:
    """Ask the server of `rankless.spawn` for a process with these descriptors. Raises OSError if the server is gone."""
    socket.send_fds(control, [FORK], [channel, status, folder, output, errors])


def receive_process_request(control: socket.socket) -> list[int] | None:
    """Receive the five descriptors of `ask_for_process`. Returns None if nobody will ask any more."""
    message, descriptors, _flags, _address = socket.recv_fds(control, len(FORK), _FORK_DESCRIPTORS)
    return descriptors if message == FORK else None


def send_number(status: socket.socket, number: int) -> None:
    """Send the process id of a new process, or later its wait status."""
    with contextlib.suppress(OSError):  # nobody waits for it any more
        status.sendall(_NUMBER.pack(number))


def receive_number(status: socket.socket) -> int | None:
    """Receive a number of `send_number`. None if the server is gone; BlockingIOError if none has come."""
    try:
        data = status.recv(_NUMBER.size, socket.MSG_WAITALL)
    except ConnectionError:
        return None
    return int(_NUMBER.unpack(data)[0]) if len(data) == _NUMBER.size else None


def receive_ready(connection: socket.socket) -> bool:
    """Wait for a server's first message. Returns False if the server has ended before it was ready."""
    try:
        return connection.recv(len(READY)) == READY
    except OSError:
        return False


@contextlib.contextmanager
def open_current_folder() -> Iterator[int]:
    """Open the current folder, for the new process to inherit."""
    folder = os.open(".", os.O_PATH | os.O_DIRECTORY)
    try:
        yield folder
    finally:
        os.close(folder)

"""A process that `rankless.spawn` starts: receives a function, calls it with its rank, and sends the outcome back."""

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable

import cloudpickle  # type: ignore[import-untyped]  # it has no types

from rankless.records.framing import FrameFormat, receive_message
from rankless.runtime.fast_exit import FastExit
from rankless.runtime.hooks import import_aliases
from rankless.runtime.process_tree import set_parent_death_signal
from rankless.terminal import process_title

_FRAME_FORMAT = FrameFormat("<Q")


def main(_fast_exit: FastExit) -> Callable[[], None]:
    """Return what runs the function that arrives on the inherited socket."""
    descriptor, rank, parent, count = map(int, sys.argv[2:6])
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent ended before the line above
    channel = socket.socket(fileno=descriptor)
    process_title.show_worker(sys.argv[6], rank, count)
    sys.argv = ["-c"]
    import_aliases.install()
    return lambda: _serve(channel, rank)


def _serve(channel: socket.socket, rank: int) -> None:
    payload = receive(channel)
    if payload is None:
        os._exit(1)  # the parent is gone
    try:
        path, call = cloudpickle.loads(payload)
        sys.path[:] = path
        function, args = cloudpickle.loads(call)
        answer = ("result", function(rank, *args), "")
        data = cloudpickle.dumps(answer)
    except Exception as error:  # the function is the script's own; its error goes to the caller of spawn
        data = _encode_error(error)
        send(channel, data)
        channel.close()
        sys.exit(1)
    send(channel, data)
    channel.close()


def _encode_error(error: Exception) -> bytes:
    trace = "".join(traceback.format_exception(error))
    without_trace = error.with_traceback(None)
    try:
        data: bytes = cloudpickle.dumps(("error", without_trace, trace))
        cloudpickle.loads(data)
    except Exception:  # the error does not survive pickling
        data = cloudpickle.dumps(("error", RuntimeError(f"{type(error).__name__}: {error}"), trace))
    return data


def send(channel: socket.socket, data: bytes) -> None:
    """Write one message."""
    channel.sendall(_FRAME_FORMAT.encode(data))


def receive(channel: socket.socket) -> bytes | None:
    """Read one message. Returns None if the other end is gone."""
    return receive_message(channel, _FRAME_FORMAT)

"""How the agent orders one more worker from the workers' parent: a launch, and the worker's end of its word channel."""

import socket

import msgspec

from rankless.plan.run_plan import WorkerLaunch

_LONGEST = 1 << 18


def send_order(orders: socket.socket, launch: WorkerLaunch, words: socket.socket) -> None:
    """Order a worker, which gets `words`. Raises OSError if the parent is gone."""
    socket.send_fds(orders, [msgspec.json.encode(launch)], [words.fileno()])


def receive_order(orders: socket.socket) -> WorkerLaunch | None:
    """The next worker that is ordered; None once there will be none. Raises BlockingIOError if there is none yet."""
    try:
        data, descriptors, _flags, _address = socket.recv_fds(orders, _LONGEST, 1)
    except ConnectionError:
        return None
    if not data:
        return None
    launch = msgspec.json.decode(data, type=WorkerLaunch)
    return msgspec.structs.replace(launch, plan=msgspec.structs.replace(launch.plan, rounds_descriptor=descriptors[0]))

"""How the agent orders one more worker from the workers' parent: a launch, the worker's end of its word channel, and
memory for where it is.
"""

import socket

import msgspec

from rankless.plan.run_plan import WorkerLaunch

_LONGEST = 1 << 18


def send_order(orders: socket.socket, launch: WorkerLaunch, words: socket.socket, *, page: int | None = None) -> None:
    """Order a worker, which gets `words`, and writes on `page` where it is. Raises OSError if the parent is gone."""
    descriptors = [words.fileno()] if page is None else [words.fileno(), page]
    socket.send_fds(orders, [msgspec.json.encode(launch)], descriptors)


def receive_order(orders: socket.socket) -> WorkerLaunch | None:
    """The next worker that is ordered; None once there will be none. Raises BlockingIOError if there is none yet."""
    try:
        data, descriptors, _flags, _address = socket.recv_fds(orders, _LONGEST, 2)
    except ConnectionError:
        return None
    if not data:
        return None
    launch = msgspec.json.decode(data, type=WorkerLaunch)
    words, page = (*descriptors, None)[:2]
    told = msgspec.structs.replace(launch.plan, rounds_descriptor=words, whereabouts_descriptor=page)
    return msgspec.structs.replace(launch, plan=told)

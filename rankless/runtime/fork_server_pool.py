"""The fork server: imports torch once and forks the warm parents of several runs, one after the other.

Note [fork server]: it never computes, runs nothing of the user's, and keeps nothing of a run: each has a warm parent
of its own, forked from the same clean state, so a run cannot tell that another was before it. A warm parent is forked
by a process in between that ends at once, so that the agent, which adopts orphans, becomes its parent as if it had
started it itself: it waits for it and has its exit code, and Note [guard] holds word for word. The fork server dies
with the agent.
"""

import fcntl
import gc
import os
import socket
import sys
from collections.abc import Callable

import msgspec

from rankless.config.worker_config import ForkServerPoolConfig, HostConfig
from rankless.runtime.fast_exit import FastExit
from rankless.runtime.fork_server import import_torch, lead, withdraw
from rankless.runtime.spawn_protocol import READY, receive_host_config, send_process_id


def main(fast_exit: FastExit) -> Callable[[], None] | None:
    """Fork warm parents for as long as the agent asks; in a worker of one, return with what it is to run."""
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=ForkServerPoolConfig)
    cores = withdraw()
    agent = socket.socket(fileno=config.connection_descriptor)
    if not import_torch(with_jobs=config.with_jobs):
        return None
    gc.freeze()
    host_plan = _serve(agent)
    return None if host_plan is None else lead(host_plan, fast_exit=fast_exit, warm=True, cores=cores)


def _serve(agent: socket.socket) -> HostConfig | None:
    """Fork as asked; returns the plan of a run in the process that is to be its parent, and None at the end."""
    agent.sendall(READY)
    while (order := receive_host_config(agent)) is not None:
        config, descriptors = order
        if _fork_for(agent):
            _take_over(config, descriptors)
            return config
        for descriptor in descriptors:
            os.close(descriptor)
    return None


def _fork_for(agent: socket.socket) -> bool:
    """Fork a process whose parent is the agent, and tell the agent its id; returns True in it.

    It goes on only once that is done: of a process that lives the agent knows, though this one be killed meanwhile.
    """
    numbers, numbers_end = os.pipe()
    gate, gate_end = os.pipe()
    between = os.fork()
    if between == 0:
        orphan = os.fork()
        if orphan != 0:
            os.write(numbers_end, str(orphan).encode())
            os._exit(0)
        agent.close()
        for descriptor in (numbers, numbers_end, gate_end):
            os.close(descriptor)
        if not os.read(gate, 1):
            os._exit(1)
        os.close(gate)
        return True
    os.close(numbers_end)
    os.waitpid(between, 0)
    send_process_id(agent, int(os.read(numbers, 20)))
    os.write(gate_end, b"g")
    for descriptor in (numbers, gate, gate_end):
        os.close(descriptor)
    return False


def _take_over(config: HostConfig, received: list[int]) -> None:
    """Be as if the agent had started this process: in its folder, a session of its own, its output in the log."""
    os.setsid()
    folder, log, *others = received
    os.fchdir(folder)
    wanted = [1, 2, *config.descriptors()]
    # Out of the way first: a descriptor that has come may have the number that another is to get.
    free = max(*wanted, *received) + 1
    apart = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, free) for descriptor in (log, log, *others)]
    for descriptor in received:
        os.close(descriptor)
    for descriptor, number in zip(apart, wanted, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)

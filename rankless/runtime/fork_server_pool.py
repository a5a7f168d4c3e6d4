"""The fork server pool: imports torch once, and forks the fork servers of several runs, one after the other.

Note [fork server pool]: the pool never computes, runs no code of the user, and keeps nothing of a run. Each run gets a
fork server of its own, forked from the same clean state, so a run cannot see that another came before it. A process in
between forks the fork server and ends at once. The agent adopts orphans, so it becomes the parent of the fork server,
as if it had started that itself: it waits for it and gets its exit code, and Note [guard] applies unchanged. The pool
dies with the agent.
"""

import fcntl
import gc
import os
import socket
import sys
from collections.abc import Callable

import msgspec

from rankless.config.process_configs import ForkServerPoolConfig, HostConfig
from rankless.runtime.fast_exit import FastExit
from rankless.runtime.fork_and_spawn_server_messages import READY, receive_host_config, send_process_id
from rankless.runtime.fork_server import preload_modules, prepare_process, serve_run
from rankless.terminal import process_title


def main(fast_exit: FastExit) -> Callable[[], None] | None:
    """Fork fork servers for as long as the agent asks. In a worker of one, return the function that it runs."""
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=ForkServerPoolConfig)
    process_title.show_fork_server(None)
    cores = prepare_process()
    agent = socket.socket(fileno=config.connection_descriptor)
    if not preload_modules(with_jobs=config.with_jobs):
        return None
    gc.freeze()
    host_config = _serve(agent)
    if host_config is None:
        return None
    process_title.show_fork_server(host_config.program, from_pool=True)
    return serve_run(host_config, fast_exit=fast_exit, warm=True, cores=cores)


def _serve(agent: socket.socket) -> HostConfig | None:
    """Fork as the agent asks. Return the config of a run in the run's fork server, and None in the pool at its end."""
    agent.sendall(READY)
    while (request := receive_host_config(agent)) is not None:
        config, descriptors = request
        if _fork_for_agent(agent):
            _take_over(config, descriptors)
            return config
        for descriptor in descriptors:
            os.close(descriptor)
    return None


def _fork_for_agent(agent: socket.socket) -> bool:
    """Fork a process whose parent is the agent, and send the agent its id. Return True in the new process.

    The new process continues only after that: if the pool is killed meanwhile, the agent knows each living process.
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
    """Set up this process as if the agent had started it: its folder, a session of its own, its output in the log."""
    os.setsid()
    folder, log, *others = received
    os.fchdir(folder)
    wanted = [1, 2, *config.descriptors()]
    # First duplicate all above the wanted numbers: a received descriptor may have the number that another one needs.
    free = max(*wanted, *received) + 1
    duplicates = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, free) for descriptor in (log, log, *others)]
    for descriptor in received:
        os.close(descriptor)
    for descriptor, number in zip(duplicates, wanted, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)

"""Pools of real worker processes, which start once and serve all tests.

The workers form a process group with Gloo over loopback, or with NCCL with one worker on each GPU.
`on_mesh(3, function, 7)` calls `function(mesh, 7)` in each of three workers and returns their three results by rank.
The workers find the function by its name, so it must be at the top level of its test file.
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from support.devices import DEVICE, use_test_device

from rankless.parallel.mesh import Mesh

DEADLINE_SECONDS = 60.0
GRACE_SECONDS = 8.0
"""How long the other workers may take after one has failed: they may wait for it in a collective."""

WORKER_MODULES = ("torch._dynamo", "torch._functorch.aot_autograd", "rankless.api", "rankless.jobs.job")
"""What most workers of tests import: two seconds of each one."""
SERVER_PROGRAM = ("rankless.extensions.servers.service.process",) if find_spec("numba") and find_spec("zmq") else ()
"""The module of a parameter server, which tests fork too."""

_pools: dict[tuple[int, str], "Pool"] = {}


def on_mesh(size: int, function: Callable[..., Any], *arguments: Any, backend: str = "gloo") -> list[Any]:
    """Return the results of `function(mesh, *arguments)` on `size` workers, by rank. Raises a worker's error.

    With `backend="nccl"` worker i uses GPU i, and so does its `mesh.device`.
    """
    key = (size, backend)
    if key not in _pools:
        _pools[key] = Pool(size, backend)
    pool = _pools[key]
    try:
        answers = pool.call(function, arguments)
    except BaseException:
        _discard(key)
        raise
    errors = [answer for answer in answers if isinstance(answer, Exception)]
    if not errors:
        return answers
    # Workers with different errors may have stopped at different collectives: the next test gets new ones.
    same_error = len(errors) == size and len({type(error) for error in errors}) == 1
    if not same_error or not pool.is_alive:
        _discard(key)
    raise errors[0]


def close_pools() -> None:
    """End all workers of all pools."""
    for key in list(_pools):
        _discard(key)


def _discard(key: tuple[int, str]) -> None:
    _pools.pop(key).close()


def fork_server_context() -> ForkServerContext:
    """Return a context whose fork server imports torch once for all processes, and has no threads when it forks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.tensor", "numpy", *WORKER_MODULES, *SERVER_PROGRAM])
    return context


class Pool:
    """`size` workers in one process group, each with a pipe to this process."""

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="rankless-mesh-")
        self.pipes: list[Connection] = []
        self.processes: list[ForkServerProcess] = []
        context = fork_server_context()
        for rank in range(size):
            own_end, worker_end = context.Pipe()
            # Not daemons: they may not have children, and loaders with `num_workers` start some.
            rank_info = (rank, size, backend)
            process = context.Process(target=_serve, args=(worker_end, rank_info, f"{self.folder.name}/store"))
            process.start()
            worker_end.close()
            self.pipes.append(own_end)
            self.processes.append(process)

    @property
    def is_alive(self) -> bool:
        """Whether all workers are alive."""
        return all(process.is_alive() for process in self.processes)

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
        """Return each worker's result, or the exception that it raised."""
        task = pickle.dumps((function, arguments))
        for pipe in self.pipes:
            pipe.send((list(sys.path), task))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(answers) < len(self.pipes):
            waiting = [rank for rank in range(len(self.pipes)) if rank not in answers]
            if not wait([self.pipes[rank] for rank in waiting], timeout=max(0.0, deadline - time.monotonic())):
                for error in filter(lambda answer: isinstance(answer, Exception), answers.values()):
                    raise error
                self._dump_stacks()
                raise TimeoutError(f"{function.__qualname__}: no answer from ranks {waiting} in time")
            for rank in waiting:
                if self.pipes[rank].poll():
                    answers[rank] = self._receive(rank)
                    if isinstance(answers[rank], Exception):
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return [answers[rank] for rank in range(len(self.pipes))]

    def _dump_stacks(self) -> None:
        """Have every worker and its children dump their stacks to stderr."""
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker = psutil.Process(process.pid)
                for each in (worker, *worker.children(recursive=True)):
                    each.send_signal(signal.SIGUSR1)
                    time.sleep(0.2)

    def _receive(self, rank: int) -> Any:
        try:
            answer, trace = pickle.loads(self.pipes[rank].recv())
        except EOFError:
            self.processes[rank].join()
            return RuntimeError(f"rank {rank} died with exit code {self.processes[rank].exitcode}")
        if trace:
            answer.add_note(f"on rank {rank} of {len(self.pipes)}:\n{trace}")
        return answer

    def close(self) -> None:
        """Kill the workers, and wait until they have ended."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def _serve(pipe: Connection, rank_info: tuple[int, int, str], store_file: str) -> None:
    """Run a worker: join the process group, and execute tasks until the pipe closes."""
    rank, size, backend = rank_info
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Otherwise children of this process would come from a fork server too, but the workers of a run fork their readers.
    multiprocessing.set_start_method("fork", force=True)
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=loopback, NCCL_SOCKET_IFNAME=loopback)
    torch.set_num_threads(1)
    store = dist.FileStore(store_file, size)
    timeout = timedelta(seconds=DEADLINE_SECONDS)
    use_test_device()
    device = DEVICE
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    mesh = Mesh(rank=rank, size=size, device=device, group=dist.group.WORLD)
    with contextlib.suppress(EOFError):
        while True:
            path, task = pipe.recv()
            sys.path[:] = path
            answer = _execute(task, mesh)
            _close_groups_of_task()
            pipe.send(answer)


def _close_groups_of_task() -> None:
    """Close the process groups that a task has made: each of Gloo's has a thread that wakes up 160 times a second."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    if _count_threads("gloo_tcp_loop") > 1:
        # A traceback in a reference cycle holds a group. Its thread takes a whole core once another rank has closed it.
        gc.collect()


def _count_threads(name: str) -> int:
    """Return how many threads of this process have a name; 0 outside of Linux."""
    found = 0
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it has ended
            found += (task / "comm").read_text().strip() == name
    return found


def _execute(task: bytes, mesh: Mesh) -> bytes:
    """Return the pickled result and "", or the pickled exception and its traceback."""
    try:
        function, arguments = pickle.loads(task)
        return pickle.dumps((function(mesh, *arguments), ""))
    except Exception as error:
        trace = traceback.format_exc()
        try:
            answer = pickle.dumps((error, trace))
            pickle.loads(answer)
        except Exception:
            answer = pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), trace))
        return answer

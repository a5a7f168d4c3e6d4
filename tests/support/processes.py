"""Real processes for tests: pools of workers joined by Gloo over loopback (or by NCCL, one on each GPU), started once
and used by every test.

`on_mesh(3, function, 7)` calls `function(mesh, 7)` in each of three workers and returns their three results
in the order of ranks. The function is found by name, so it must stand at the top level of its test file.
"""

import contextlib
import faulthandler
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
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import psutil
import torch
import torch.distributed as dist

from rankless.parallel.mesh import Mesh

DEADLINE_SECONDS = 60.0
GRACE_SECONDS = 8.0
"""How long the others may take once one worker has failed: they may be waiting for it in a collective."""

_pools: dict[tuple[int, str], "Pool"] = {}


def on_mesh(size: int, function: Callable[..., Any], *arguments: Any, backend: str = "gloo") -> list[Any]:
    """The results of `function(mesh, *arguments)` on `size` workers, by rank; a worker's error is raised.

    With `backend="nccl"` worker i is on GPU i, and so is `mesh.device`.
    """
    kind = (size, backend)
    if kind not in _pools:
        _pools[kind] = Pool(size, backend)
    pool = _pools[kind]
    try:
        answers = pool.call(function, arguments)
    except BaseException:
        _discard(kind)
        raise
    errors = [answer for answer in answers if isinstance(answer, Exception)]
    if not errors:
        return answers
    # Workers that failed differently may have stopped at different collectives: the next test gets new ones.
    alike = len(errors) == size and len({type(error) for error in errors}) == 1
    if not alike or not pool.lives:
        _discard(kind)
    raise errors[0]


def close_pools() -> None:
    """End every worker of every pool."""
    for kind in list(_pools):
        _discard(kind)


def _discard(kind: tuple[int, str]) -> None:
    _pools.pop(kind).close()


def importing_once() -> ForkServerContext:
    """Starts processes from a fork server, which imports torch once for all, and forks before any thread exists."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.tensor", "numpy"])
    return context


class Pool:
    """`size` living workers in one process group, each at the end of a pipe."""

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="rankless-mesh-")
        self.pipes: list[Connection] = []
        self.processes: list[ForkServerProcess] = []
        context = importing_once()
        for rank in range(size):
            ours, theirs = context.Pipe()
            # Not daemons: daemons may have no children, and loaders with `num_workers` do.
            place = (rank, size, backend)
            process = context.Process(target=_serve, args=(theirs, place, f"{self.folder.name}/store"))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    @property
    def lives(self) -> bool:
        """Whether no worker has ended."""
        return all(process.is_alive() for process in self.processes)

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
        """Each worker's result, or the exception that it raised."""
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
                self._show_where()
                raise TimeoutError(f"{function.__qualname__}: no answer from ranks {waiting} in time")
            for rank in waiting:
                if self.pipes[rank].poll():
                    answers[rank] = self._answer(rank)
                    if isinstance(answers[rank], Exception):
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return [answers[rank] for rank in range(len(self.pipes))]

    def _show_where(self) -> None:
        """Let every worker and its children write to stderr where they are."""
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker = psutil.Process(process.pid)
                for part in (worker, *worker.children(recursive=True)):
                    part.send_signal(signal.SIGUSR1)
                    time.sleep(0.2)

    def _answer(self, rank: int) -> Any:
        try:
            answer, trace = pickle.loads(self.pipes[rank].recv())
        except EOFError:
            self.processes[rank].join()
            return RuntimeError(f"rank {rank} died with exit code {self.processes[rank].exitcode}")
        if trace:
            answer.add_note(f"on rank {rank} of {len(self.pipes)}:\n{trace}")
        return answer

    def close(self) -> None:
        """End the workers, and wait until they are gone."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def _serve(pipe: Connection, place: tuple[int, int, str], store_file: str) -> None:
    """A worker's life: join the group, answer tasks until the pipe closes."""
    rank, size, backend = place
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # A process of a fork server would start its own children by one too: in a run's workers readers are forked.
    multiprocessing.set_start_method("fork", force=True)
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=loopback, NCCL_SOCKET_IFNAME=loopback)
    torch.set_num_threads(1)
    store = dist.FileStore(store_file, size)
    timeout = timedelta(seconds=DEADLINE_SECONDS)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    mesh = Mesh(rank=rank, size=size, device=device, group=dist.group.WORLD)
    with contextlib.suppress(EOFError):
        while True:
            path, task = pipe.recv()
            sys.path[:] = path
            pipe.send(_perform(task, mesh))


def _perform(task: bytes, mesh: Mesh) -> bytes:
    """The pickled result and "", or the pickled exception and its traceback."""
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

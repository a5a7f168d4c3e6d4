"""`rankless.spawn`: a script or a notebook starts workers itself, and each runs one of its functions.

Note [functions by value]: each worker is as good as a new interpreter with this one's flags and module path. It
receives the function through cloudpickle, which pickles definitions of a script, a notebook or the interpreter by
value. So the workers do not run the script again, and its main part needs no guard.
"""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, get_args

import cloudpickle  # type: ignore[import-untyped]  # it has no types

from rankless.config.environment import spawned_environment
from rankless.errors import ConfigError, LaunchError
from rankless.launch.function_pickle import pickle_call
from rankless.launch.ports import reserve_master_port
from rankless.launch.signals import name_signal
from rankless.launch.spawn_output import Show, SpawnOutput
from rankless.launch.spawn_server_client import ForkedProcess, SpawnServerClient
from rankless.records.encoding import encode_json
from rankless.runtime.fork_server_protocol import SpawnedProcess, receive_call, send_call
from rankless.runtime.subprocess_command import python_command

GRACE_SECONDS = 2.0
LEAVING_SECONDS = 10.0
"""The time that a worker has to end after it has returned its result, or has closed its channel without one."""
_SERVER = SpawnServerClient()
"""The server of this process. It stays between calls, so that later calls need not import torch again."""


class Spawned:
    """The handle of `rankless.spawn(..., join=False)`: workers that run.

    Example:
        >>> spawned = rankless.spawn(divmod, args=(2,), nprocs=2, join=False)
        >>> spawned.join()
        [(0, 0), (0, 1)]
    """

    def __init__(self, payload: bytes, count: int, show: Show, name: str) -> None:
        script = os.path.basename(sys.argv[0] if sys.argv else "")
        self._title = f"{script} {name}()".strip()
        self._results: dict[int, Any] = {}
        self._processes: list[subprocess.Popen[bytes] | ForkedProcess] = []
        self._channels: dict[int, socket.socket] = {}
        self._reserved = reserve_master_port()
        self._output = SpawnOutput(show)
        try:
            for rank in range(count):
                self._start(rank, count, payload)
            self._output.start()
        except BaseException:
            self.terminate()
            raise

    @property
    def process_ids(self) -> list[int]:
        """The process ids of the workers, by rank."""
        return [process.pid for process in self._processes]

    def join(self, timeout_seconds: float | None = None) -> list[Any] | None:
        """Wait for the workers, and return what the function returned, by rank.

        Args:
            timeout_seconds: How long to wait, in seconds. Default: for ever.

        Returns:
            The results by rank; None if a worker still runs at the timeout.

        Raises:
            LaunchError: A worker ended without a result.
            Exception: The function raised on a worker. The exception is the worker's, with a note that names the rank;
                the other workers have been terminated.

        Example:
            >>> rankless.spawn(divmod, args=(2,), join=False).join(timeout_seconds=60)
            [(0, 0)]
        """
        __tracebackhide__ = True  # notebooks show the user's frames only
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        with selectors.DefaultSelector() as selector:
            for rank, channel in self._channels.items():
                if rank not in self._results:
                    selector.register(channel, selectors.EVENT_READ, rank)
            try:
                while selector.get_map():
                    left = None if deadline is None else max(0.0, deadline - time.monotonic())
                    ready = selector.select(left)
                    if not ready:
                        return None
                    for key, _ in ready:
                        selector.unregister(key.fileobj)
                        self._results[key.data] = self._result_of(key.data)
            except BaseException:
                self.terminate()
                raise
        deadline = time.monotonic() + LEAVING_SECONDS
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self.terminate()  # do not wait for one that has returned its result and hangs in a thread or at its exit
        return [self._results[rank] for rank in range(len(self._processes))]

    def terminate(self) -> None:
        """Terminate the workers that still run: SIGTERM, then SIGKILL.

        Example:
            >>> spawned = rankless.spawn(time.sleep, args=(), nprocs=1, join=False)
            >>> spawned.terminate()
        """
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + GRACE_SECONDS
            for process in self._processes:
                if process.poll() is None:
                    process.send_signal(number)
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        for channel in self._channels.values():
            channel.close()
        self._reserved.close()
        self._output.close()

    def _start(self, rank: int, count: int, payload: bytes) -> None:
        environment = spawned_environment(rank, count, self._reserved.getsockname()[1])
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        settings = SpawnedProcess(rank=rank, count=count, title=self._title, environment=environment, cores=cores)
        output, errors = self._output.descriptors(rank)
        ours, theirs = socket.socketpair()
        self._channels[rank] = ours
        with theirs:
            forked = _SERVER.start_process(theirs, output=output, errors=errors)
            self._processes.append(forked or _start_interpreter(theirs, environment, output=output, errors=errors))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send_call(ours, encode_json(settings))
            send_call(ours, payload)

    def _result_of(self, rank: int) -> Any:
        __tracebackhide__ = True
        data = receive_call(self._channels[rank])
        if data is None:
            raise self._make_error(rank)
        kind, value, trace = cloudpickle.loads(data)
        if kind == "error":
            value.add_note(f"on rank {rank} of {len(self._processes)}:\n{trace}")
            raise value
        return value

    def _make_error(self, rank: int) -> LaunchError:
        process = self._processes[rank]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LEAVING_SECONDS)
        code = process.poll()
        if code is None:
            found = "it closed its channel without a result, and still runs"
        else:
            found = f"it was killed by {name_signal(-code)}" if code < 0 else f"it ended with exit code {code}"
        error = LaunchError(
            expected=f"rank {rank} to return from the function, or to raise",
            found=found,
            fix="read its output; the kernel sends SIGKILL when memory runs out",
        )
        if tail := self._output.tail(rank):
            error.add_note(f"the end of the output of rank {rank}:\n{tail}")
        return error


def _start_interpreter(
    channel: socket.socket, environment: dict[str, str], *, output: int, errors: int
) -> subprocess.Popen[bytes]:
    """Start a worker as a new interpreter, where no server can fork it."""
    command = [*python_command("rankless.runtime.spawned_function"), str(channel.fileno()), str(os.getpid())]
    return subprocess.Popen(
        command,
        env=environment,
        pass_fds=[channel.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
    )


def spawn(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    *,
    show: Show = "first",
    take_states: Callable[[], Any],
) -> list[Any] | Spawned:
    """Run `function(rank, *args)` in `nprocs` new processes; return the results, or a handle with `join=False`.

    `take_states` returns the states of the random generators with which every process starts.
    """
    __tracebackhide__ = True
    if not callable(function):
        raise ConfigError(
            expected="a function to spawn, called as function(rank, *args)",
            found=type(function).__name__,
            fix="pass the function itself, without calling it",
        )
    if isinstance(nprocs, bool) or not isinstance(nprocs, int) or nprocs < 1:
        raise ConfigError(
            expected="nprocs= of at least 1", found=repr(nprocs), fix="give the number of processes to start"
        )
    if show not in get_args(Show):
        raise ConfigError(
            expected='show="first" or show="all"', found=f"show={show!r}", fix="name the ranks whose output to show"
        )
    states = take_states()
    call, sources = pickle_call(function, tuple(args))
    # The path goes first, and the call separately: unpickling the function needs the path to find modules.
    payload = cloudpickle.dumps((list(sys.path), sources, states, call))
    spawned = Spawned(payload, nprocs, show, getattr(function, "__name__", "function"))
    if not join:
        return spawned
    results = spawned.join()
    assert results is not None
    return results

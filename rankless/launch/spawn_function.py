"""`rankless.spawn`: a script starts workers itself, and each runs one of its functions.

Note [functions by value]: each worker is a new interpreter with this one's flags and module path. It receives the
function through cloudpickle, which pickles definitions of a script, a notebook or the interpreter by value. So the
workers do not run the script again, and its main part needs no guard.
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
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # it has no types

from rankless.config.environment import spawned_environment
from rankless.errors import ConfigError, LaunchError
from rankless.launch.ports import reserve_master_port
from rankless.launch.supervisor.failure_attribution import name_signal
from rankless.runtime.spawn_main import receive, send
from rankless.runtime.subprocess_command import python_command

GRACE_SECONDS = 2.0
LEAVING_SECONDS = 10.0
"""The time that a worker has to end after it has returned its result."""


class Spawned:
    """The handle of `rankless.spawn(..., join=False)`: workers that run.

    Example:
        >>> spawned = rankless.spawn(divmod, args=(2,), nprocs=2, join=False)
        >>> spawned.join()
        [(0, 0), (0, 1)]
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], count: int) -> None:
        script = os.path.basename(sys.argv[0] if sys.argv else "")
        self._name = f"{script} {getattr(function, '__name__', 'function')}()".strip()
        self._results: dict[int, Any] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: dict[int, socket.socket] = {}
        # The path goes first and separately: unpickling the function needs it to find modules.
        payload = cloudpickle.dumps((list(sys.path), cloudpickle.dumps((function, args))))
        self._reserved = reserve_master_port()
        try:
            for rank in range(count):
                self._start(rank, count, payload)
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

    def _start(self, rank: int, count: int, payload: bytes) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = map(str, (theirs.fileno(), rank, os.getpid(), count))
            command = [*python_command("rankless.runtime.spawn_main"), *arguments, self._name]
            environment = spawned_environment(rank, count, self._reserved.getsockname()[1])
            process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        self._processes.append(process)
        self._channels[rank] = ours
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send(ours, payload)

    def _result_of(self, rank: int) -> Any:
        data = receive(self._channels[rank])
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
            process.wait(GRACE_SECONDS)
        code = process.returncode
        killed = code is not None and code < 0
        return LaunchError(
            expected=f"rank {rank} to return from the function, or to raise",
            found=f"it was killed by {name_signal(-code)}" if killed and code else f"it ended with exit code {code}",
            fix="read its output; the kernel sends SIGKILL when memory runs out",
        )


def spawn(
    function: Callable[..., Any], args: Sequence[Any] = (), nprocs: int = 1, join: bool = True
) -> list[Any] | Spawned:
    """Run `function(rank, *args)` in `nprocs` new processes; return the results, or a handle with `join=False`."""
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
    spawned = Spawned(function, tuple(args), nprocs)
    if not join:
        return spawned
    results = spawned.join()
    assert results is not None
    return results

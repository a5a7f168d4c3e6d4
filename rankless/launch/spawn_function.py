"""`rankless.spawn`: a script or a notebook starts workers itself, and each runs one of its functions.

Note [functions by value]: each worker is as good as a new interpreter with this one's flags and module path. It
receives the function through cloudpickle, which pickles definitions of a script, a notebook or the interpreter by
value. So the workers do not run the script again, and its main part needs no guard. The code of a notebook's cell has a
name that only its notebook can resolve, such as /tmp/ipykernel_7/123.py. In the worker its lines are called as the
notebook calls them ("Cell In[3]"), and tracebacks show them.
"""

import codecs
import collections
import contextlib
import io
import linecache
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, BinaryIO, Literal, TextIO, get_args

import cloudpickle  # type: ignore[import-untyped]  # it has no types

from rankless.config.environment import read_at_start, snapshot, spawn_server_environment, spawned_environment
from rankless.errors import ConfigError, LaunchError
from rankless.launch.ports import reserve_master_port
from rankless.launch.signal_reader import name_signal
from rankless.records.encoding import encode_json
from rankless.runtime.fork_and_spawn_server_messages import (
    SpawnedProcess,
    ask_for_process,
    open_current_folder,
    receive_call,
    receive_number,
    receive_ready,
    send_call,
)
from rankless.runtime.subprocess_command import python_command
from rankless.user_code import cell_name

Show = Literal["first", "all"]
"""Whose output the caller shows."""
_TAIL_BYTES = 2000
_LEAVING_SECONDS = 2.0


class SpawnOutput:
    """The output of the processes of one call.

    A notebook, `contextlib.redirect_stdout` and the like replace `sys.stdout` by an object that is no file. The shown
    output is then copied into that object.
    """

    def __init__(self, show: Show) -> None:
        self._show = show
        self._hidden: dict[int, BinaryIO] = {}
        self._ends: list[int] = []
        self._copied: dict[int, TextIO] = {}
        self._thread: threading.Thread | None = None
        self._shown = tuple(self._descriptor(stream) for stream in (sys.stdout, sys.stderr))

    def descriptors(self, rank: int) -> tuple[int, int]:
        """Return the descriptors of a rank's standard output and standard error."""
        if rank == 0 or self._show == "all":
            return self._shown[0], self._shown[1]
        self._hidden[rank] = tempfile.TemporaryFile()  # noqa: SIM115  # close() closes it
        descriptor = self._hidden[rank].fileno()
        return descriptor, descriptor

    def start(self) -> None:
        """Begin to copy, when all processes have their descriptors."""
        for end in self._ends:
            os.close(end)
        self._ends = []
        if self._copied and self._thread is None:
            self._thread = threading.Thread(target=self._copy, name="rankless-spawn-output", daemon=True)
            self._thread.start()

    def tail(self, rank: int) -> str:
        """Return the end of a hidden rank's output."""
        file = self._hidden.get(rank)
        if file is None:
            return ""
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        return file.read().decode(errors="replace").strip()

    def close(self) -> None:
        """Wait for what is still to be copied, and delete the hidden output."""
        self.start()
        if self._thread is not None:
            self._thread.join(_LEAVING_SECONDS)  # a process that a worker left behind may still have the pipe
        for file in self._hidden.values():
            file.close()

    def _descriptor(self, stream: TextIO | None) -> int:
        if stream is None:
            end = os.open(os.devnull, os.O_WRONLY)
            self._ends.append(end)
            return end
        with contextlib.suppress(OSError, ValueError):
            if isinstance(stream, io.TextIOWrapper):
                stream.flush()
                return stream.fileno()
        reading, writing = os.pipe()
        self._ends.append(writing)
        self._copied[reading] = stream
        return writing

    def _copy(self) -> None:
        decoders = {end: codecs.getincrementaldecoder("utf-8")("replace") for end in self._copied}
        with selectors.DefaultSelector() as selector:
            for end in self._copied:
                selector.register(end, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    data = os.read(key.fd, 1 << 16)
                    with contextlib.suppress(OSError, ValueError):  # the stream may be closed by now
                        self._copied[key.fd].write(decoders[key.fd].decode(data, final=not data))
                        self._copied[key.fd].flush()
                    if not data:
                        selector.unregister(key.fd)
                        os.close(key.fd)


GRACE_SECONDS = 2.0
LEAVING_SECONDS = 10.0
"""The time that a worker has to end after it has returned its result, or has closed its channel without one."""


def pickle_call(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bytes, dict[str, list[str]]]:
    """Return a function and its arguments as bytes, and the source lines of its code that stands in no file."""
    with io.BytesIO() as buffer:
        pickler = _CodePickler(buffer)
        pickler.dump((function, args))
        return buffer.getvalue(), pickler.sources


class _CodePickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    def __init__(self, file: io.BytesIO) -> None:
        self.sources: dict[str, list[str]] = {}
        self._reduce = cloudpickle.Pickler.dispatch_table[types.CodeType]
        # Before the constructor, which reads it.
        self.dispatch_table: MutableMapping[type, Any] = collections.ChainMap(
            {types.CodeType: self._reduce_code}, cloudpickle.Pickler.dispatch_table
        )
        super().__init__(file)

    def _reduce_code(self, code: types.CodeType) -> Any:
        file, name = code.co_filename, cell_name(code.co_filename) or code.co_filename
        if name not in self.sources and not os.path.exists(file) and (lines := linecache.getlines(file)):
            self.sources[name] = lines
        return self._reduce(code.replace(co_filename=name))


IMPORT_TIMEOUT_SECONDS = 120.0


class ForkedProcess:
    """A process that the server has forked, with the part of `subprocess.Popen` that `Spawned` needs."""

    def __init__(self, process_id: int, status: socket.socket) -> None:
        self.pid = process_id
        self._status: socket.socket | None = status
        self._exit_code: int | None = None
        status.setblocking(False)

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self._status is not None:
            try:
                status = receive_number(self._status)
            except BlockingIOError:
                return None
            # A server that is gone has taken its processes with it.
            self._exit_code = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
            self._status.close()
            self._status = None
        return self._exit_code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code. Raises `subprocess.TimeoutExpired`."""
        if self._status is not None:
            select.select([self._status], [], [], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class SpawnServerClient:
    """A server of `rankless.spawn` as its caller sees it. It starts with the first process that is asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._caller: int | None = None
        self._read_at_start: dict[str, str] = {}
        self._control: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._is_ready = self._cannot_fork = False

    def start_process(self, channel: socket.socket, *, output: int, errors: int) -> ForkedProcess | None:
        """Start a process with this end of its channel, or return None if this system cannot fork it."""
        with self._lock:
            for _attempt in range(2):  # a server that was killed is replaced
                control = self._ready_server()
                if control is None:
                    return None
                ours, theirs = socket.socketpair()
                with contextlib.suppress(OSError), theirs, open_current_folder() as folder:
                    ask_for_process(
                        control,
                        channel=channel.fileno(),
                        status=theirs.fileno(),
                        folder=folder,
                        output=output,
                        errors=errors,
                    )
                process_id = receive_number(ours)
                if process_id is not None:
                    return ForkedProcess(process_id, ours)
                ours.close()
                self._release()
        return None

    def _ready_server(self) -> socket.socket | None:
        """Return the socket to a server that has imported torch in this environment; start one if there is none."""
        if self._caller != os.getpid() or self._read_at_start != read_at_start(snapshot()):
            self._release()
            self._cannot_fork = not hasattr(os, "pidfd_open")
        if self._cannot_fork:
            return None
        if self._control is None:
            self._start()
        control = self._control
        assert control is not None
        if not self._is_ready:
            has_answered = bool(select.select([control], [], [], IMPORT_TIMEOUT_SECONDS)[0])
            self._is_ready = has_answered and receive_ready(control)
        if not self._is_ready:
            self._release()
            self._cannot_fork = True
        return self._control

    def _start(self) -> None:
        self._control, end = socket.socketpair()
        self._caller, self._read_at_start = os.getpid(), read_at_start(snapshot())
        with end:
            command = [*python_command("rankless.runtime.spawn_server"), str(end.fileno()), str(os.getpid())]
            self._server = subprocess.Popen(
                command,
                env=spawn_server_environment(),
                pass_fds=[end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _release(self) -> None:
        """Ask this server no more. It ends by itself when the last of its processes has ended."""
        if self._control is not None:
            self._control.close()
        self._control = self._server = None
        self._is_ready = False


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

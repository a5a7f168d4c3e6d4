"""Processes that a script in the logical view starts, and its terminal: rank 0 has them, and shares what they say.

Processes that libraries start stay each rank's own, such as compilers and the readers of a `DataLoader`.
"""

import concurrent.futures
import functools
import io
import multiprocessing.pool
import multiprocessing.process
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from rankless.plain_script.effects_on_first_rank import Effects, replace_everywhere

POPEN, RUN = subprocess.Popen, subprocess.run
PLAIN_CALLS = (
    *((subprocess, name) for name in ("call", "check_call", "check_output", "getoutput", "getstatusoutput")),
    (os, "system"),
)
"""Functions that start a process, wait for its end, and return plain values."""
JOINS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (threading.Thread, ("join",)),
    (multiprocessing.process.BaseProcess, ("join",)),
    (multiprocessing.pool.Pool, ("join", "map", "starmap", "apply", "__exit__")),
    (multiprocessing.pool.ApplyResult, ("get",)),
    (concurrent.futures.Future, ("result",)),
    (concurrent.futures.Executor, ("__exit__",)),
    (concurrent.futures.ThreadPoolExecutor, ("shutdown",)),
    (concurrent.futures.ProcessPoolExecutor, ("shutdown",)),
)
"""Methods that wait for threads and processes of the script itself."""


class SharedReader(io.RawIOBase):
    """What rank 0 reads, on all ranks.

    Args:
        effects: What the ranks do once.
        what: What is read, for messages.
        read: On rank 0, returns at most so many bytes, or none at the end.
        is_terminal: Returns on rank 0 whether it is a terminal.
    """

    def __init__(
        self, effects: Effects, what: str, read: Callable[[int], bytes], *, is_terminal: Callable[[], bool] = bool
    ) -> None:
        super().__init__()
        self._effects = effects
        self._what = what
        self._read = read
        self._is_terminal = is_terminal

    def readable(self) -> bool:
        """Return True."""
        return True

    def isatty(self) -> bool:
        """Return whether rank 0 reads a terminal."""
        return bool(self._effects.once(f"isatty of {self._what}", self._is_terminal))

    def readinto(self, buffer: Any, /) -> int:
        """Read into a buffer, and return the number of bytes."""
        if not self._effects.is_active or not self._effects.can_meet:
            data = self._read(len(buffer)) if self._effects.is_first else b""
        else:
            data = self._effects.once(f"read {self._what}", lambda: self._read(len(buffer)))
        buffer[: len(data)] = data
        return len(data)


class SharedWriter(io.RawIOBase):
    """Writes on rank 0 alone."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        self._target = target

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any, /) -> int:
        """Write bytes on rank 0."""
        if self._target is not None:
            self._target.write(data)
            self._target.flush()
        return memoryview(data).nbytes

    def close(self) -> None:
        """Close it on rank 0."""
        if not self.closed and self._target is not None:
            self._target.close()
        super().close()


class SharedProcess:
    """A process that rank 0 has started, on all ranks. It has what `subprocess.Popen` has.

    Args:
        effects: What the ranks do once.
        arguments: Those of `Popen`.
    """

    def __init__(self, effects: Effects, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        self._effects = effects
        self._real: Any = None
        given, options = arguments
        self.args = given[0] if given else options.get("args")
        self._name = name_command(self.args)
        self.pid, has_input, has_output, has_errors, encoding, errors = self._once(
            "start", lambda: self._start(arguments)
        )
        text = (encoding, errors)
        self.stdin = self._make_stream(has_input, text, lambda: SharedWriter(self._find_raw("stdin")))
        self.stdout = self._make_stream(has_output, text, lambda: self._make_reader("stdout"))
        self.stderr = self._make_stream(has_errors, text, lambda: self._make_reader("stderr"))
        self.returncode: int | None = None

    def _start(self, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Any]:
        given, options = arguments
        self._real = real = POPEN(*given, **options)
        text = next(
            (each for each in (real.stdin, real.stdout, real.stderr) if isinstance(each, io.TextIOWrapper)), None
        )
        streams = [real.stdin is not None, real.stdout is not None, real.stderr is not None]
        return [real.pid, *streams, None if text is None else text.encoding, None if text is None else text.errors]

    def _once(self, what: str, act: Callable[[], Any]) -> Any:
        return share_process_errors(self._effects, f"{what} {self._name}", act, self.args)

    def _find_raw(self, name: str) -> Any:
        stream = getattr(self._real, name, None)
        return getattr(stream, "buffer", stream)

    def _make_reader(self, name: str) -> SharedReader:
        def read(count: int) -> bytes:
            source = self._find_raw(name)
            found: bytes = (source.read1 if hasattr(source, "read1") else source.read)(count)
            return found

        return SharedReader(self._effects, f"{name} of {self._name}", read)

    def _make_stream(self, exists: bool, text: tuple[str | None, str | None], make_raw: Callable[[], Any]) -> Any:
        """Return a stream of the process as the script sees it."""
        if not exists:
            return None
        raw = make_raw()
        buffered: Any = io.BufferedReader(raw) if raw.readable() else io.BufferedWriter(raw)
        encoding, errors = text
        return buffered if encoding is None else io.TextIOWrapper(buffered, encoding, errors, write_through=True)

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self.returncode is None:
            self.returncode = self._once("poll", lambda: self._real.poll())
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            self.returncode = self._once("wait for", lambda: self._real.wait(timeout))
        assert self.returncode is not None
        return self.returncode

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:
        """Send input, and return what the process writes until its end. Raises `subprocess.TimeoutExpired`."""
        if self.stdin is not None and not self.stdin.closed:
            self.stdin.flush()
        out, err, code = self._once(
            "communicate with", lambda: [*self._real.communicate(input, timeout), self._real.returncode]
        )
        self.returncode = code
        return out, err

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        self._once("send a signal to", lambda: self._real.send_signal(number))

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._once("terminate", lambda: self._real.terminate())

    def kill(self) -> None:
        """Send SIGKILL."""
        self._once("kill", lambda: self._real.kill())

    def __enter__(self) -> "SharedProcess":
        return self

    def __exit__(self, *_error: object) -> None:
        for stream in (self.stdout, self.stderr, self.stdin):
            if stream is not None:
                stream.close()
        self.wait()


def name_command(args: Any) -> str:
    """Return a command for messages."""
    text = args if isinstance(args, str) else " ".join(map(str, args)) if isinstance(args, list | tuple) else str(args)
    return f"process {text[:80]!r}"


def share_process_errors(effects: Effects, what: str, act: Callable[[], Any], args: Any) -> Any:
    """Act once; the errors of a process that fails or takes too long have the output that rank 0 has."""

    def attempt() -> list[Any]:
        try:
            return ["", act()]
        except subprocess.CalledProcessError as error:
            return ["failed", error.returncode, error.output, error.stderr]
        except subprocess.TimeoutExpired as error:
            return ["late", error.timeout, error.output, error.stderr]

    found = effects.once(what, attempt)
    kind, value, *output = found
    if kind == "failed":
        raise subprocess.CalledProcessError(value, args, *output)
    if kind == "late":
        raise subprocess.TimeoutExpired(args, value, *output)
    return value


class ProcessEffects:
    """The processes that this rank's script starts, and its standard input.

    Args:
        effects: What the ranks do once.
    """

    def __init__(self, effects: Effects) -> None:
        self._effects = effects

    def install(self, *, shares_input: bool) -> None:
        """Replace the functions that start processes, and standard input if ranks share it, until this process ends."""
        replaced = [(owner, name, self._call_of(vars(owner)[name])) for owner, name in PLAIN_CALLS]
        effects = self._effects

        class Popen(subprocess.Popen):  # type: ignore[type-arg]  # it stays a class, for those that inherit from it
            __doc__ = POPEN.__doc__

            def __new__(cls, *args: Any, **kwargs: Any) -> Any:
                if cls is Popen and is_own_call(effects, sys._getframe(1)):
                    return SharedProcess(effects, (args, kwargs))
                return super().__new__(cls)

        for owner, names in JOINS:
            for name in names:
                setattr(owner, name, self._join_of(vars(owner)[name]))
        Popen.__name__ = Popen.__qualname__ = "Popen"
        replace_everywhere([*replaced, (subprocess, "run", self._run), (subprocess, "Popen", Popen)])
        if not shares_input:
            return
        reader = SharedReader(
            effects, "standard input", lambda count: os.read(0, count), is_terminal=lambda: os.isatty(0)
        )
        sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(reader), encoding=sys.stdin.encoding)  # type: ignore[misc]

    def _call_of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not is_own_call(self._effects, sys._getframe(1)):
                return function(*args, **kwargs)
            command = args[0] if args else kwargs.get("args")

            def act() -> Any:
                result = function(*args, **kwargs)
                return list(result) if isinstance(result, tuple) else result

            result = share_process_errors(self._effects, f"run {name_command(command)}", act, command)
            return tuple(result) if isinstance(result, list) else result

        call.__name__ = call.__qualname__ = function.__name__
        return call

    def _join_of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method after which the ranks meet, if it has waited for the end."""

        may_return_before = function.__name__ in ("join", "get", "result", "shutdown")

        @functools.wraps(function)
        def join(own: Any, *args: Any, **kwargs: Any) -> Any:
            effects, given = self._effects, [*args, *kwargs.values()]
            is_own = effects.is_active and effects.can_meet and effects.find_kind(sys._getframe(1)) == "script"
            if not is_own or (may_return_before and not all(each in (None, True) for each in given)):
                return function(own, *args, **kwargs)
            with effects.alone():  # it may join several, as many as have started here
                result = function(own, *args, **kwargs)
            effects.meet("the end of a thread or process")
            return result

        return join

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a process, as `subprocess.run` does."""
        if not is_own_call(self._effects, sys._getframe(1)):
            return RUN(*args, **kwargs)
        command = args[0] if args else kwargs.get("args")

        def act() -> list[Any]:
            done = RUN(*args, **kwargs)
            return [done.returncode, done.stdout, done.stderr]

        found = share_process_errors(self._effects, f"run {name_command(command)}", act, command)
        return subprocess.CompletedProcess(command or "", *found)


def is_own_call(effects: Effects, frame: Any) -> bool:
    """Return whether one of the script's own files makes a call, perhaps by Python's functions for processes."""
    if not (effects.is_active and effects.can_meet):
        return False
    while frame is not None and frame.f_globals.get("__name__") in ("subprocess", "os"):
        frame = frame.f_back
    return frame is not None and effects.find_kind(frame) == "script"

"""The doctor's program on one host: it reads requests from standard input and writes responses to standard output.

It ends when either is closed.
"""

import contextlib
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import IO

import msgspec

from rankless.config import environment
from rankless.config.extensions import find_extension, import_declared
from rankless.launch.doctor.preflight_and_host_checks import check_host, read_host_identity
from rankless.launch.doctor.probe_protocol import (
    ApplyEnvironment,
    CheckExtension,
    CheckHost,
    ClockTime,
    ConnectionAttempts,
    ConnectToTargets,
    ExtensionChecked,
    ListenersOpened,
    MeasureLink,
    OpenListeners,
    ProbeDone,
    ProbeFailed,
    ProbeReady,
    ProbeRequest,
    ProbeResponse,
    ReadClock,
    RelayTask,
    StartCollectiveProcess,
)
from rankless.launch.rendezvous import connect_and_measure
from rankless.records.doctor_records import MARK, AllReduceFailed, CheckResult, CollectiveTestResult
from rankless.records.encoding import encode_json
from rankless.runtime.fast_exit import FastExit
from rankless.runtime.subprocess_command import python_command


def main(fast_exit: FastExit) -> Callable[[], None]:  # noqa: ARG001  # every process of Rankless starts with this signature
    """Return the function that serves requests until standard input ends."""
    return _serve


class ProbeServer:
    """Holds what lives between requests: the listeners and the process of the collective test."""

    def __init__(self) -> None:
        self._listeners: list[socket.socket] = []
        self._collective_process: subprocess.Popen[bytes] | None = None
        self._stderr_file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the program runs

    def respond(self, request: ProbeRequest) -> ProbeResponse:
        """Carry out a request and return the response."""
        if isinstance(request, CheckHost):
            return check_host(request)
        if isinstance(request, CheckExtension):
            return ExtensionChecked(result=_check_extension(request.extension))
        if isinstance(request, ApplyEnvironment):
            environment.apply(request.environment)
            return ProbeDone()
        if isinstance(request, ReadClock):
            return ClockTime(seconds=time.time())
        if isinstance(request, OpenListeners):
            return self._listen(request)
        if isinstance(request, ConnectToTargets):
            return ConnectionAttempts(attempts=connect_and_measure.connect_all(request.targets, request.secret))
        if isinstance(request, MeasureLink):
            return connect_and_measure.measure_link(request.target, request.secret)
        if isinstance(request, StartCollectiveProcess):
            self._start_collective_process()
            return ProbeDone()
        return self._relay(request)

    def close(self) -> None:
        """Close the listeners and end the collective test's process."""
        for listener in self._listeners:
            listener.close()
        if self._collective_process is not None:
            self._collective_process.kill()
            self._collective_process.wait()

    def _listen(self, request: OpenListeners) -> ProbeResponse:
        free_port_listener = connect_and_measure.start_listener(request.host_index, request.secret)
        own_listener = None
        if request.port is not None:
            own_listener = connect_and_measure.start_listener(
                request.host_index, request.secret, request.port, request.address
            )
        if free_port_listener is None:
            return ProbeFailed(text="no free port")
        self._listeners += [free_port_listener] if own_listener is None else [free_port_listener, own_listener]
        return ListenersOpened(high_port=free_port_listener.getsockname()[1], has_port=own_listener is not None)

    def _start_collective_process(self) -> None:
        self._collective_process = subprocess.Popen(
            python_command("rankless.runtime.doctor_collective_test"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr_file,
        )

    def _relay(self, request: RelayTask) -> ProbeResponse:
        process = self._collective_process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(request.line + b"\n")
            process.stdin.flush()
        deadline = time.monotonic() + request.timeout_seconds
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while selector.select(max(0.0, deadline - time.monotonic())):
                line = process.stdout.readline()
                if not line:
                    return ProbeFailed(text=self._read_last_error(process))
                if line.startswith(MARK):
                    result = msgspec.json.decode(line.removeprefix(MARK), type=CollectiveTestResult)
                    return ProbeFailed(text=result.text) if isinstance(result, AllReduceFailed) else result
        return ProbeFailed(text=f"no answer within {request.timeout_seconds:g} s")

    def _read_last_error(self, process: subprocess.Popen[bytes]) -> str:
        code = process.wait()
        self._stderr_file.seek(0)
        lines = self._stderr_file.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"the process that imports torch ended with {code}"


def _serve() -> None:
    server = ProbeServer()
    _send(ProbeReady(identity=read_host_identity()))
    try:
        for line in sys.stdin.buffer:
            _send(server.respond(msgspec.json.decode(line, type=ProbeRequest)))
    except BrokenPipeError:
        pass  # the doctor has ended
    finally:
        server.close()


def _check_extension(name: str) -> CheckResult:
    extension = find_extension(name)
    assert extension is not None
    assert extension.doctor_check is not None
    check = extension.doctor_check
    run: Callable[[], CheckResult] = import_declared(name, "doctor_check.module", check.module, name="run_check")
    return run()


def _send(response: ProbeResponse) -> None:
    sys.stdout.buffer.write(MARK + encode_json(response) + b"\n")
    sys.stdout.buffer.flush()

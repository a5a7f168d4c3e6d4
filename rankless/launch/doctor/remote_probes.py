"""Start a probe server on every host, by ssh or directly on this host, and send requests to all of them at once."""

import contextlib
import os
import selectors
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from rankless.config.hosts_and_addresses import Host
from rankless.launch.doctor.probe_protocol import (
    ClockTime,
    ProbeFailed,
    ProbeReady,
    ProbeRequest,
    ProbeResponse,
    ReadClock,
)
from rankless.launch.rendezvous.ssh import SSH_OPTIONS, SshCause, find_ssh_cause
from rankless.records.doctor_records import MARK, CheckResult, make_failure
from rankless.records.encoding import encode_json
from rankless.runtime.subprocess_command import python_command

CONNECT_TIMEOUT_SECONDS = 5
READY_TIMEOUT_SECONDS = 8.0
RESPONSE_TIMEOUT_SECONDS = 12.0
CLOCK_SAMPLES = 3
_PROGRAM = "rankless.launch.doctor.probe_server"
_NO_RESPONSE = "no response from its probe"
_NO_FOLDER, _NO_PYTHON = 90, 91

Result = TypeVar("Result")


class HostProbe:
    """The probe server on one host."""

    def __init__(self, host: Host, *, is_local: bool) -> None:
        self.host = host
        self._is_local = is_local
        self._target = host.ssh_target
        self._buffer = b""
        self._failure: ProbeFailed | None = None
        self.connect_seconds = 0.0
        self.identity = ""
        self._stderr_file = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the probe
        command = python_command(_PROGRAM)
        if not is_local:
            ssh = ["ssh", "-o", f"ConnectTimeout={CONNECT_TIMEOUT_SECONDS}", *SSH_OPTIONS]
            command = [*ssh, self._target, "--", _make_remote_command(command)]
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(FileNotFoundError):
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr_file, start_new_session=True
            )

    def wait_until_ready(self) -> CheckResult | None:
        """Wait for the probe server; return None once it is ready, else a failed result."""
        if self._process is None:
            return make_failure(
                "ssh", "no ssh client is installed here", "install the OpenSSH client, or start the job with --no-ssh"
            )
        start = time.monotonic()
        first = self._read_response(READY_TIMEOUT_SECONDS)
        if isinstance(first, ProbeReady):
            self.connect_seconds = time.monotonic() - start
            self.identity = first.identity
            return None
        if self._process.poll() is None and not self._has_ended():
            return make_failure(
                "ssh",
                f"no answer within {READY_TIMEOUT_SECONDS:.0f} s",
                f"run ssh {self._target} true to see the cause, such as a slow login script or name resolution",
            )
        cause = self._find_cause()
        return make_failure("program" if self._is_local else "ssh", cause.seen, cause.fix)

    def request(self, request: ProbeRequest, timeout_seconds: float = RESPONSE_TIMEOUT_SECONDS) -> ProbeResponse:
        """Send a request and return the response; after a timeout, return the same failure for all later requests."""
        if self._failure is not None:
            return self._failure
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(encode_json(request) + b"\n")
            self._process.stdin.flush()
        response = self._read_response(timeout_seconds)
        # A late response would be mistaken for the next request's.
        self._failure = (
            response if isinstance(response, ProbeFailed) and response.text.startswith(_NO_RESPONSE) else None
        )
        return response

    def measure_clock(self) -> tuple[float, float] | None:
        """Return how many seconds the host's clock is ahead of this one's, and the uncertainty in seconds.

        Takes the middle of the shortest of a few round trips, as NTP does.
        """
        best: tuple[float, float] | None = None
        for _ in range(CLOCK_SAMPLES):
            start = time.time()
            response = self.request(ReadClock())
            end = time.time()
            if isinstance(response, ClockTime) and (best is None or (end - start) / 2 < best[1]):
                best = response.seconds - (start + end) / 2, (end - start) / 2
        return best

    def close(self) -> None:
        """End the probe server by closing its standard input."""
        if self._process is None:
            return
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr_file.close()

    def _read_response(self, timeout_seconds: float) -> ProbeResponse:
        """Read the next line with our mark; a login script may print other lines."""
        assert self._process is not None
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while True:
                line, found, rest = self._buffer.partition(b"\n")
                if found:
                    self._buffer = rest
                    if line.startswith(MARK):
                        response: ProbeResponse = msgspec.json.decode(line.removeprefix(MARK), type=ProbeResponse)
                        return response
                    continue
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return ProbeFailed(text=f"{_NO_RESPONSE} within {timeout_seconds:g} s")
                data = os.read(self._process.stdout.fileno(), 1 << 16)
                if not data:
                    return ProbeFailed(text=self._find_cause().seen)
                self._buffer += data

    def _has_ended(self) -> bool:
        assert self._process is not None
        try:
            self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _find_cause(self) -> SshCause:
        assert self._process is not None
        self._has_ended()
        code = self._process.poll()
        if code == _NO_FOLDER:
            return SshCause(f"the folder {os.getcwd()} does not exist there", "copy or mount it there")
        if code == _NO_PYTHON:
            return SshCause(
                f"the interpreter {sys.executable} does not exist there", "copy or mount it there under the same path"
            )
        self._stderr_file.seek(0)
        lines = self._stderr_file.read().decode(errors="replace").strip().splitlines()
        cause = find_ssh_cause(" / ".join(lines), self._target)
        if cause is not None:
            return SshCause(f"{cause.seen} ({lines[-1].strip()})", cause.fix)
        ended = f"it ended with exit code {code}" if code is not None else "it stopped responding"
        seen = f"{ended}: {' / '.join(line.strip() for line in lines[-4:])}" if lines else ended
        return SshCause(seen, f"try ssh {self._target} true")


class HostProbes:
    """The probe servers on all hosts, by index in the list of hosts."""

    def __init__(self, hosts: Sequence[Host], *, own_index: int | None, skipped: Sequence[int] = ()) -> None:
        indices = [index for index in range(len(hosts)) if index not in skipped]
        self._all = {index: HostProbe(hosts[index], is_local=index == own_index) for index in indices}
        self.ready: dict[int, HostProbe] = {}

    def __enter__(self) -> "HostProbes":
        return self

    def __exit__(self, *_error: object) -> None:
        _run_concurrently(self._all, lambda _, probe: probe.close())

    def wait_until_ready(self) -> dict[int, CheckResult]:
        """Wait for all probe servers; return the failed results by index, and keep the others in `ready`."""
        found = _run_concurrently(self._all, lambda _, probe: probe.wait_until_ready())
        self.ready = {index: self._all[index] for index, result in found.items() if result is None}
        return {index: result for index, result in found.items() if result is not None}

    def measure_clocks(self, indices: Sequence[int]) -> dict[int, tuple[float, float] | None]:
        """Return the clock offsets of these hosts; see `HostProbe.measure_clock`."""
        return _run_concurrently(
            {index: self.ready[index] for index in indices}, lambda _, probe: probe.measure_clock()
        )

    def request(
        self, requests: Mapping[int, ProbeRequest], timeout_seconds: float = RESPONSE_TIMEOUT_SECONDS
    ) -> dict[int, ProbeResponse]:
        """Send each host its request, all at once, and return the responses."""
        probes = {index: self.ready[index] for index in requests if index in self.ready}
        return _run_concurrently(probes, lambda index, probe: probe.request(requests[index], timeout_seconds))


def _run_concurrently(probes: Mapping[int, HostProbe], call: Callable[[int, HostProbe], Result]) -> dict[int, Result]:
    with ThreadPoolExecutor(max(1, len(probes))) as pool:
        return dict(zip(probes, pool.map(call, probes.keys(), probes.values()), strict=True))


def _make_remote_command(command: Sequence[str]) -> str:
    """Return the shell command for the remote login; its exit code tells which path is missing there."""
    folder, python = shlex.quote(os.getcwd()), shlex.quote(sys.executable)
    enter = f"cd {folder} || exit {_NO_FOLDER}; test -x {python} || exit {_NO_PYTHON}"
    return f"{enter}; exec {shlex.join(command)}"

"""Agents of other hosts, started by the system's ssh, with the user's own configuration of it.

Note [what goes over ssh]: the command line names a folder, an interpreter and this package; all else, the token too,
goes through standard input. That stays open: an agent whose standard input ends before it has joined gives up. Once it
has joined, the control channel is its lifeline, and ssh may die without harm to the job.
"""

import contextlib
import os
import shlex
import subprocess
import threading
from collections.abc import Callable, Mapping

import msgspec

from rankless.launch.ssh_causes import ssh_cause
from rankless.plan.run_plan import Program, RunRequest
from rankless.runtime.bootstrap import python_command

OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")
LAST_LINES = 4
REFUSED = 2
"""An agent ends with it that has said itself why it does not start."""
LEAVING_SECONDS = 2.0


class RemoteTask(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent that ssh has started is told through its standard input."""

    program: Program
    request: RunRequest
    token: bytes
    environment: Mapping[str, str]
    script: bytes | None = None
    """The script's text, for a host that has another one or none."""


class RemoteAgent:
    """The ssh process of one other host."""

    def __init__(self, task: RemoteTask, *, tell: Callable[[str], None]) -> None:
        company = task.request.company
        assert company is not None
        host = company.hosts[company.place]
        self._name = host.address
        self._tell = tell
        self._lines: list[str] = []
        self._has_joined = False
        self._target = host.address if host.user is None else f"{host.user}@{host.address}"
        self._process = subprocess.Popen(
            ["ssh", *OPTIONS, self._target, "--", remote_command()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the agents: they end their workers in order
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(task) + b"\n")
            self._process.stdin.flush()
        self._reader = threading.Thread(target=self._read, name=f"ssh {self._name}", daemon=True)
        self._reader.start()

    def joined(self) -> None:
        """Its agent has come: what it has to say from now on comes over the control channel."""
        self._has_joined = True

    def ended(self) -> str | None:
        """Why it has ended, if it has, in words."""
        if self._process.poll() is None:
            return None
        self._reader.join(1.0)
        said = " / ".join(self._lines[-LAST_LINES:])
        cause = ssh_cause(said, self._target)
        if cause is not None and self._process.returncode != REFUSED:
            return f"{cause.seen} ({said}): {cause.fix}"
        return f"ssh ended with {self._process.returncode}" + (f": {said}" if said else "")

    def close(self) -> None:
        """Wait a little for its end, then end it."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(LEAVING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.decode(errors="replace").rstrip()
            self._lines.append(text)
            if self._process.poll() is None and not self._has_joined:
                self._tell(f"{self._name}: {text.removeprefix('rankless: ')}")


def remote_command() -> str:
    """The command line on the other host: the same folder, interpreter and flags as here."""
    command = shlex.join(python_command("rankless.launch.remote_agent"))
    return f"cd {shlex.quote(os.getcwd())} && exec {command}"

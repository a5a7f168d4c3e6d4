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
import time
from collections.abc import Callable, Mapping

import msgspec

from rankless.config.run_config import Cluster, Program, RunRequest
from rankless.launch.rendezvous.job_token import folder_of_tokens, name_of_token
from rankless.launch.rendezvous.ssh_failures import find_ssh_cause
from rankless.runtime.python_command import python_command

SSH_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")
LAST_LINES = 4
REFUSED = 2
"""An agent ends with it that has said itself why it does not start."""
LEAVING_SECONDS = 2.0
BRING_AGAIN_SECONDS = 5.0


class RemoteTask(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent that ssh has started is told through its standard input."""

    program: Program
    request: RunRequest
    token: bytes
    environment: Mapping[str, str]
    script: bytes | None = None
    """The script's text, for a host that has another one or none."""


class SshAgent:
    """The ssh process of one other host, which starts its agent and keeps its standard input."""

    def __init__(self, task: RemoteTask, *, tell: Callable[[str], None]) -> None:
        cluster = task.request.cluster
        assert cluster is not None
        self._name = cluster.hosts[cluster.host_index].address
        self._tell = tell
        self._has_joined = False
        self._login = SshSession(cluster, cluster.host_index, remote_command(), on_line=self._show)
        self._login.say(msgspec.json.encode(task) + b"\n")

    def joined(self) -> None:
        """Its agent has come: what it has to say from now on comes over the control channel."""
        self._has_joined = True

    def ended(self) -> str | None:
        """Why it has ended, if it has, in words."""
        return None if self._login.is_running() else self._login.why_ended()

    def close(self) -> None:
        """Wait a little for its end, then end it."""
        self._login.close()

    def _show(self, text: str) -> None:
        if not self._has_joined:
            self._tell(f"{self._name}: {text.removeprefix('rankless: ')}")


class SshTokenDelivery:
    """Brings the job's token to a host where a script is started by hand, again and again until its agent has come."""

    def __init__(self, cluster: Cluster, place: int, token: bytes) -> None:
        self._host = (cluster, place)
        self._token = token
        folder, name = folder_of_tokens(), shlex.quote(name_of_token(cluster))
        self._command = f"umask 077; cd && mkdir -p {folder} && cd {folder} && cat > {name}.new && mv {name}.new {name}"
        self._has_joined = False
        self._bring()

    def joined(self) -> None:
        """The agent has come."""
        self._has_joined = True

    def ended(self) -> str | None:
        """Why the token could not be brought, in words."""
        if self._login.is_running():
            return None
        if not self._login.has_succeeded():
            return f"{self._login.why_ended()}; RANKLESS_TOKEN_FILE on all hosts, or insecure=True, does without ssh"
        if not self._has_joined and time.monotonic() - self._begun > BRING_AGAIN_SECONDS:
            self._bring()
        return None

    def close(self) -> None:
        """End what runs."""
        self._login.close()

    def _bring(self) -> None:
        self._begun = time.monotonic()
        self._login = SshSession(*self._host, self._command, on_line=lambda _: None)
        self._login.say(self._token + b"\n")
        self._login.end_input()


class SshSession:
    """One ssh to one host, and what it prints."""

    def __init__(self, cluster: Cluster, place: int, command: str, *, on_line: Callable[[str], None]) -> None:
        host = cluster.hosts[place]
        self._target = host.address if host.user is None else f"{host.user}@{host.address}"
        self._on_line = on_line
        self._lines: list[str] = []
        self._process = subprocess.Popen(
            ["ssh", *SSH_OPTIONS, *_own_options(cluster), self._target, "--", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the agents: they end their workers in order
        )
        self._reader = threading.Thread(target=self._read, name=f"ssh {self._target}", daemon=True)
        self._reader.start()

    def say(self, data: bytes) -> None:
        """Write to the command's standard input."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def end_input(self) -> None:
        """Let the command find the end of its standard input."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def has_succeeded(self) -> bool:
        """Whether the command has, once it is over."""
        return self._process.poll() == 0

    def why_ended(self) -> str:
        """In words, from the last that it has printed."""
        self._reader.join(1.0)
        said = " / ".join(self._lines[-LAST_LINES:])
        cause = find_ssh_cause(said, self._target)
        if cause is not None and self._process.returncode != REFUSED:
            return f"{cause.seen} ({said}): {cause.fix}"
        return f"ssh ended with {self._process.returncode}" + (f": {said}" if said else "")

    def close(self) -> None:
        """Wait a little for its end, then end it."""
        self.end_input()
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
            self._on_line(text)


def _own_options(cluster: Cluster) -> list[str]:
    port = [] if cluster.ssh_port is None else ["-p", str(cluster.ssh_port)]
    return port + ([] if cluster.ssh_identity_file is None else ["-i", cluster.ssh_identity_file])


def remote_command() -> str:
    """The command line on the other host: the same folder, interpreter and flags as here."""
    command = shlex.join(python_command("rankless.launch.remote_agent"))
    return f"cd {shlex.quote(os.getcwd())} && exec {command}"

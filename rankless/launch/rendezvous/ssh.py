"""Starts the agents of other hosts through the system's ssh, with the user's own ssh configuration.

It finds out why ssh has failed from the messages of OpenSSH and of the shells that it starts.

Note [what goes over ssh]: the command line names a folder, an interpreter and this package. Everything else, the token
included, goes through standard input, which stays open. An agent whose standard input ends before it has joined exits.
After it has joined, the control channel shows whether host 0 is alive, and the end of ssh does no harm.
"""

import contextlib
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from rankless.config.run_config import Cluster, Program, RunRequest
from rankless.install_command import format_install_command
from rankless.launch.rendezvous.job_token import TOKEN_FOLDER, token_file_name
from rankless.records.encoding import encode_json
from rankless.runtime.subprocess_command import python_command

SSH_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")
AGENT_REFUSED_EXIT_CODE = 2
"""The exit code of an agent that has printed why it does not start."""
_MAX_SHOWN_LINES = 4
_CLOSE_TIMEOUT_SECONDS = 2.0
_DELIVERY_RETRY_SECONDS = 5.0


class RemoteTask(msgspec.Struct, frozen=True, kw_only=True):
    """The input of an agent that ssh has started."""

    program: Program
    request: RunRequest
    token: bytes
    environment: Mapping[str, str]
    script: bytes | None = None
    """The script's text, for a host that has another one or none."""


class SshAgent:
    """The ssh process of one other host. It starts the agent there and holds its standard input open."""

    def __init__(self, task: RemoteTask, *, notify: Callable[[str], None]) -> None:
        cluster = task.request.cluster
        assert cluster is not None
        self._name = cluster.hosts[cluster.host_index].address
        self._notify = notify
        self._has_joined = False
        self._session = SshSession(cluster, cluster.host_index, make_agent_command(), on_line=self._show)
        self._session.write(encode_json(task) + b"\n")

    def mark_joined(self) -> None:
        """Note that the agent has joined: its messages now arrive over the control channel."""
        self._has_joined = True

    def find_failure(self) -> str | None:
        """Return why ssh has ended, or None while it runs."""
        return None if self._session.is_running() else self._session.explain_end()

    def close(self) -> None:
        """Wait a little for ssh to end, then kill it."""
        self._session.close()

    def _show(self, text: str) -> None:
        if not self._has_joined:
            self._notify(f"{self._name}: {text.removeprefix('rankless: ')}")


class SshTokenDelivery:
    """Delivers the job's token to a host where the user starts a script, repeatedly until the agent has joined."""

    def __init__(self, cluster: Cluster, host_index: int, token: bytes) -> None:
        self._host = (cluster, host_index)
        self._token = token
        folder, name = TOKEN_FOLDER, shlex.quote(token_file_name(cluster))
        self._command = f"umask 077; cd && mkdir -p {folder} && cd {folder} && cat > {name}.new && mv {name}.new {name}"
        self._has_joined = False
        self._deliver()

    def mark_joined(self) -> None:
        """Note that the agent has joined."""
        self._has_joined = True

    def find_failure(self) -> str | None:
        """Return why the token could not be delivered, or None."""
        if self._session.is_running():
            return None
        if not self._session.has_succeeded():
            return f"{self._session.explain_end()}; RANKLESS_TOKEN_FILE on all hosts, or insecure=True, needs no ssh"
        if not self._has_joined and time.monotonic() - self._delivered_at > _DELIVERY_RETRY_SECONDS:
            self._deliver()
        return None

    def close(self) -> None:
        """End ssh if it runs."""
        self._session.close()

    def _deliver(self) -> None:
        self._delivered_at = time.monotonic()
        self._session = SshSession(*self._host, self._command, on_line=lambda _: None)
        self._session.write(self._token + b"\n")
        self._session.close_input()


class SshSession:
    """One ssh process that runs a command on one host, and the output of that command."""

    def __init__(self, cluster: Cluster, host_index: int, command: str, *, on_line: Callable[[str], None]) -> None:
        host = cluster.hosts[host_index]
        self._target = host.ssh_target
        self._on_line = on_line
        self._lines: list[str] = []
        self._process = subprocess.Popen(
            ["ssh", *SSH_OPTIONS, *_make_cluster_options(cluster), self._target, "--", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the agents only: they end their workers in order
        )
        self._reader = threading.Thread(target=self._read, name=f"ssh {self._target}", daemon=True)
        self._reader.start()

    def write(self, data: bytes) -> None:
        """Write to the command's standard input."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def close_input(self) -> None:
        """Close the command's standard input."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def is_running(self) -> bool:
        """Whether ssh has not ended."""
        return self._process.poll() is None

    def has_succeeded(self) -> bool:
        """Whether the command has ended with exit code 0."""
        return self._process.poll() == 0

    def explain_end(self) -> str:
        """Return why ssh has ended, from its last lines of output."""
        self._reader.join(1.0)
        output = " / ".join(self._lines[-_MAX_SHOWN_LINES:])
        cause = find_ssh_cause(output, self._target)
        if cause is not None and self._process.returncode != AGENT_REFUSED_EXIT_CODE:
            return f"{cause.seen} ({output}): {cause.fix}"
        return f"ssh ended with {self._process.returncode}" + (f": {output}" if output else "")

    def close(self) -> None:
        """Wait a little for ssh to end, then kill it."""
        self.close_input()
        try:
            self._process.wait(_CLOSE_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.decode(errors="replace").rstrip()
            self._lines.append(text)
            self._on_line(text)


def _make_cluster_options(cluster: Cluster) -> list[str]:
    port = [] if cluster.ssh_port is None else ["-p", str(cluster.ssh_port)]
    return port + ([] if cluster.ssh_identity_file is None else ["-i", cluster.ssh_identity_file])


def make_agent_command() -> str:
    """Return the shell command for the other host: the same folder, interpreter and flags as here."""
    return make_command_in_this_folder(python_command("rankless.launch.agent_started_by_ssh"))


def make_command_in_this_folder(words: Sequence[str]) -> str:
    """Return the shell command for the other host that runs a command in the same folder as here."""
    return f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"


@dataclass(frozen=True)
class SshCause:
    """A cause of failure and its remedy, as text."""

    seen: str
    fix: str


# The order matters: the first match is the cause of later ones. `{host}` is ssh's target.
_CAUSES = {
    "REMOTE HOST IDENTIFICATION HAS CHANGED": SshCause(
        "the host's key differs from the one in known_hosts",
        "if it was reinstalled: ssh-keygen -R {host}, then log in once by hand; if not, find out who answers there",
    ),
    "Host key verification failed": SshCause(
        "the host's key is not known here",
        "log in once by hand (ssh {host} true), or: ssh-keyscan {host} >> ~/.ssh/known_hosts",
    ),
    "UNPROTECTED PRIVATE KEY": SshCause(
        "other users may read this user's private key, so ssh ignores it", "chmod 600 on the key that ssh names"
    ),
    "Too many authentication failures": SshCause(
        "the host rejects ssh after too many keys",
        "name the right key for {host} in ~/.ssh/config: IdentityFile, and IdentitiesOnly yes",
    ),
    "Permission denied": SshCause(
        "ssh asks for a password", "copy a key there: ssh-copy-id {host}; a key with a passphrase needs ssh-agent"
    ),
    "Could not resolve hostname": SshCause(
        "its name does not resolve here", "correct the name, add it to /etc/hosts, or list the host by its address"
    ),
    "Connection refused": SshCause(
        "it is up, but no sshd listens",
        "start sshd there (systemctl start ssh), or name its port in ~/.ssh/config",
    ),
    "Connection timed out": SshCause(
        "no answer: it is down, or a firewall drops packets to it", "check that it is up, and let TCP port 22 through"
    ),
    "Operation timed out": SshCause(
        "no answer: it is down, or a firewall drops packets to it", "check that it is up, and let TCP port 22 through"
    ),
    "No route to host": SshCause(
        "no route to it: the host or its network is down", "check that it is up, and its cable and network"
    ),
    "Network is unreachable": SshCause(
        "no route to it: the network of this host is down or lacks the route", "see `ip route` here"
    ),
    "Connection closed by": SshCause(
        "sshd closes the connection at once",
        "see its log there (journalctl -u ssh): MaxStartups, AllowUsers, DenyUsers",
    ),
    "Connection reset by": SshCause(
        "sshd closes the connection at once",
        "see its log there (journalctl -u ssh): MaxStartups, AllowUsers, DenyUsers",
    ),
    "No module named 'rankless'": SshCause(
        "Rankless is not installed there", "install it there, at the same path: {install}"
    ),
    "No module named": SshCause("the interpreter there lacks a package", "install the same packages there as here"),
    "No such file or directory": SshCause(
        "the folder or the interpreter of this host does not exist there",
        "copy {folder} and {python} there, or share them",
    ),
    "not found": SshCause("the interpreter of this host does not exist there", "copy {python} there, or share it"),
    "not available": SshCause("the user may not log in there", "log in as another user: user@{host}"),
}


def find_ssh_cause(output: str, host: str) -> SshCause | None:
    """Return the cause that ssh's output shows, or None."""
    for pattern, cause in _CAUSES.items():
        if pattern in output:
            install = format_install_command(pip=f"{sys.executable} -m pip")
            fix = cause.fix.format(host=host, python=sys.executable, install=install, folder=os.getcwd())
            return SshCause(cause.seen, fix)
    return None

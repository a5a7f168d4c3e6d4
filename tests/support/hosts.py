"""Simulated hosts for tests: network namespaces, each with an address, a host name and an sshd.

A bridge in a namespace of its own connects them, so no traffic leaves this machine and tests can run in parallel.
Processes on a host share the machine's files except /etc/hosts and see their own host name.
"""

import contextlib
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.jobs import DEADLINE_SECONDS, restore_interrupts

ROOT = Path(__file__).parents[2]
NAMES = ("a", "b")
SSH_SECONDS = 10.0
_NUMBERS = itertools.count()


@dataclass
class Hosts:
    """The hosts of one `some_hosts` context."""

    folder: Path
    """Holds the keys, the settings and the `ssh` command that uses them."""
    known: Sequence[str] = NAMES
    """The names of the hosts."""
    before: Mapping[str, str] = field(default_factory=dict)
    logins: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    started: list[subprocess.Popen[Any]] = field(default_factory=list)
    number: int = field(default_factory=_NUMBERS.__next__)
    """The number of this network in this process. A test may make another network besides its module's."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of the hosts, in the order of their names."""
        return tuple(f"10.77.0.{number}" for number in range(1, len(self.known) + 1))

    def run(
        self,
        name: str,
        words: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        seconds: float = DEADLINE_SECONDS,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host and return its output and exit code. `env` extends the environment of the test."""
        return subprocess.run(
            self._command(name, words),
            cwd=cwd,
            env=self._environment(env or {}),
            capture_output=True,
            text=True,
            timeout=seconds,
        )

    def start(
        self, name: str, words: Sequence[str | Path], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a command on a host. Its process id is the command's own. The end of the context kills it."""
        process = subprocess.Popen(
            self._command(name, words),
            cwd=cwd,
            env=self._environment(env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=restore_interrupts,
        )
        self.started.append(process)
        return process

    def link(self, name: str, *, up: bool) -> None:
        """Disconnect or reconnect a host at the other end of its cable: its own network card stays up."""
        _ip("-n", self.namespace("n"), "link", "set", f"to-{name}", "up" if up else "down")

    def ip(self, name: str, *words: str) -> None:
        """Run `ip` on a host, for example `hosts.ip("b", "address", "add", "fd77::2/64", "dev", "eth0")`."""
        _ip("-n", self.namespace(name), *words)

    def firewall(self, name: str, *, open_ports: Sequence[int] = (22,), closed_port: int | None = None) -> None:
        """Make a host drop incoming TCP packets, except to these ports and answers from them.

        With `closed_port` it drops those to that port only.
        """
        incoming = ("iif", "eth0", "ipproto", "tcp")
        if closed_port is not None:
            self.ip(name, "rule", "add", "pref", "1", *incoming, "dport", str(closed_port), "blackhole")
        else:
            for port in open_ports:
                for side in ("dport", "sport"):
                    self.ip(name, "rule", "add", "pref", "1", *incoming, side, str(port), "lookup", "local")
            self.ip(name, "rule", "add", "pref", "2", *incoming, "blackhole")
        # The kernel's first rule accepts everything.
        self.ip(name, "rule", "add", "pref", "3", "lookup", "local")
        self.ip(name, "rule", "del", "pref", "0")

    def names(self, name: str, text: str) -> None:
        """Replace the content of a host's /etc/hosts."""
        folder = Path("/etc/netns") / self.namespace(name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text(text)  # overwrite, do not replace: running processes have mounted this file

    def namespace(self, name: str) -> str:
        """Return the network namespace of a host, or of "n", the network between the hosts."""
        return f"rd-{os.getpid()}-{self.number}{name}"

    def processes(self, name: str) -> set[int]:
        """Return the ids of all processes that run on a host."""
        listed = subprocess.run(["ip", "netns", "pids", self.namespace(name)], capture_output=True, text=True)
        return set(map(int, listed.stdout.split()))

    def start_sshd(self, name: str) -> subprocess.Popen[bytes]:
        """Start an sshd on a host and return when it answers."""
        login = {"PYTHONPATH": str(ROOT), **self.logins.get(name, {})}
        settings = self.folder / f"sshd-{name}.conf"
        variables = " ".join(f'"{key}={value}"' for key, value in login.items())
        settings.write_text((self.folder / "sshd.conf").read_text() + f"SetEnv {variables}\n")
        with (self.folder / f"sshd-{name}.log").open("wb") as log:
            words = [_tool("sshd"), "-D", "-e", "-f", str(settings)]
            process = subprocess.Popen(self._command(name, words), stderr=log, start_new_session=True)
        self.started.append(process)
        start = time.monotonic()
        while b"Server listening" not in (self.folder / f"sshd-{name}.log").read_bytes():
            assert process.poll() is None, (self.folder / f"sshd-{name}.log").read_text()
            assert time.monotonic() - start < SSH_SECONDS, "sshd does not start"
            time.sleep(0.02)
        return process

    def _command(self, name: str, words: Sequence[str | Path]) -> list[str]:
        first = f"hostname {name}; {self.before.get(name, ':')}; exec {shlex.join(map(str, words))}"
        return ["ip", "netns", "exec", self.namespace(name), "unshare", "--uts", "--", "bash", "-c", first]

    def _environment(self, changes: Mapping[str, str]) -> dict[str, str]:
        own = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "RANKLESS_"))}
        path = f"{self.folder / 'bin'}:{own.get('PATH', os.defpath)}"
        return own | {"PATH": path, "PYTHONPATH": str(ROOT), **changes}


def two_hosts(
    folder: Path,
    *,
    sshd: Sequence[str] = NAMES,
    before: Mapping[str, str] | None = None,
    logins: Mapping[str, Mapping[str, str]] | None = None,
) -> contextlib.AbstractContextManager[Hosts]:
    """Make the hosts `a` and `b`, 10.77.0.1 and 10.77.0.2, as `some_hosts` does."""
    return some_hosts(folder, NAMES, sshd=sshd, before=before, logins=logins)


@contextlib.contextmanager
def some_hosts(
    folder: Path,
    names: Sequence[str],
    *,
    sshd: Sequence[str] | None = None,
    before: Mapping[str, str] | None = None,
    logins: Mapping[str, Mapping[str, str]] | None = None,
) -> Iterator[Hosts]:
    """Make hosts with these names and the addresses 10.77.0.1, 10.77.0.2 and so on, which reach each other by ssh.

    `sshd` names the hosts that run one, by default all. `before` maps a host to shell text that precedes every command
    there, for example `{"b": "ulimit -n 64"}`. `logins` maps a host to the environment of its ssh sessions. The test is
    skipped if the machine has no namespaces or no sshd.
    """
    _require_tools()
    _remove_leftovers()
    hosts = Hosts(folder / "hosts", known=names, before=before or {}, logins=logins or {})
    with contextlib.ExitStack() as stack:
        stack.callback(_remove, hosts)
        _make_network(hosts)
        _make_keys(hosts.folder, (*hosts.addresses, *names))
        own = "\n".join(f"{address} {name}" for address, name in zip(hosts.addresses, names, strict=True))
        for name in names:
            hosts.names(name, f"127.0.0.1 localhost\n{own}\n")
        for name in names if sshd is None else sshd:
            hosts.start_sshd(name)
        yield hosts


def _make_network(hosts: Hosts) -> None:
    network = hosts.namespace("n")
    for name in ("n", *hosts.known):
        _ip("netns", "add", hosts.namespace(name))
        _ip("-n", hosts.namespace(name), "link", "set", "lo", "up")
    _ip("-n", network, "link", "add", "bridge", "type", "bridge")
    _ip("-n", network, "link", "set", "bridge", "up")
    for name, address in zip(hosts.known, hosts.addresses, strict=True):
        namespace = hosts.namespace(name)
        # Create both ends in their final namespaces, so that device names of parallel tests cannot collide.
        _ip("-n", network, "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("-n", network, "link", "set", f"to-{name}", "master", "bridge", "up")
        _ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")


def _make_keys(folder: Path, known: Sequence[str]) -> None:
    (folder / "bin").mkdir(parents=True)
    Path("/run/sshd").mkdir(parents=True, exist_ok=True)
    for name in ("user", "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "known").write_text(f"{','.join(known)} {(folder / 'host.pub').read_text()}")
    shutil.copy(folder / "user.pub", folder / "authorized")
    (folder / "sshd.conf").write_text(
        f"HostKey {folder / 'host'}\nAuthorizedKeysFile {folder / 'authorized'}\nPidFile none\nStrictModes no\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\nPermitRootLogin yes\nUseDNS no\n"
    )
    (folder / "config").write_text(
        f"Host *\n  IdentityFile {folder / 'user'}\n  IdentitiesOnly yes\n  UserKnownHostsFile {folder / 'known'}\n"
        "  GlobalKnownHostsFile /dev/null\n"
    )
    # OpenSSH takes the home from the password file and ignores $HOME: its settings are named instead.
    (folder / "bin" / "ssh").write_text(f'#!/bin/sh\nexec {_tool("ssh")} -F {folder / "config"} "$@"\n')
    (folder / "bin" / "ssh").chmod(0o755)


def _remove(hosts: Hosts) -> None:
    for name in (*hosts.known, "n"):
        _remove_namespace(hosts.namespace(name))
    for process in hosts.started:
        process.wait()


def _remove_namespace(namespace: str) -> None:
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    for number in listed.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(number), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)
    shutil.rmtree(Path("/etc/netns") / namespace, ignore_errors=True)


def _remove_leftovers() -> None:
    """Remove the hosts of test processes that were killed."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for namespace, process_id in re.findall(r"^(rd-(\d+)-\w+)", listed, re.MULTILINE):
        if not Path("/proc", process_id).exists():
            _remove_namespace(namespace)


def _require_tools() -> None:
    if os.geteuid() != 0:
        pytest.skip("TWO HOSTS ARE NOT TESTED: network namespaces need root")
    for tool in ("ip", "unshare", "ssh", "ssh-keygen", "sshd"):
        if _tool(tool) is None:
            pytest.skip(f"TWO HOSTS ARE NOT TESTED: there is no {tool} here (apt-get install iproute2 openssh-server)")
    probe = f"rd-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True)
    if made.returncode != 0:
        pytest.skip(f"TWO HOSTS ARE NOT TESTED: no network namespaces here: {made.stderr.strip()}")


def _tool(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

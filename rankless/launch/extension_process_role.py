"""Processes of a run beside its workers. A kind of such processes is a *role*.

An extension declares its role, and has a subclass of `ProcessRole`, of which the agent makes one object for each run
that has such processes. The agent calls its methods in this order, which decision 0068 explains:

1. `reserve` on one host, or `describe`, `agree` and `answer` while the hosts of a run join. Then `attach`.
2. `start`, before any worker of any host.
3. `poll`, `tick`, `list_rows`, `cover_hosts` and `cover_processes`, several times a second. None of them waits.
4. `stop`, after the workers of this host. `release`, at the end.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rankless.config.extensions import find_extension, import_declared
from rankless.config.run_config import AgreedJobConfig, AgreedProcesses, RunConfig
from rankless.launch.launcher_profile import LauncherProfile
from rankless.launch.other_hosts_interface import Peers
from rankless.launch.signal_reader import Interrupts
from rankless.records.events import AnyRecord
from rankless.records.live_run import ProcessRow

if TYPE_CHECKING:  # most runs have one host
    from rankless.launch.rendezvous.control_server import ControlServer
    from rankless.launch.rendezvous.host_consistency import HostFacts, RoleFacts
    from rankless.records.host_connection_tests import UsedPort


@dataclass(frozen=True, kw_only=True)
class JoinedHosts:
    """All hosts of a run, before they start, as host 0 sees them."""

    server: "ControlServer"
    """The connections to the others."""
    facts: "Sequence[HostFacts]"
    names: Sequence[str]
    interrupts: Interrupts
    """The signals of this process."""


@dataclass(frozen=True, kw_only=True)
class RoleHost:
    """A host of a run whose hosts all agree, as its role sees it."""

    start: AgreedJobConfig
    profile: LauncherProfile
    names: Sequence[str]
    """The name of every host."""
    host_index: int
    peers: Peers
    token: bytes | None
    """The secret of a run on several hosts, which no host sends; None on one host."""


@dataclass(frozen=True, kw_only=True)
class WorkerContent:
    """What the workers of a host get from a role."""

    roles: Mapping[str, Any] = field(default_factory=dict)
    """What the processes are for a worker, by the name of the role, as plain values."""
    descriptors: Sequence[int] = ()
    """Descriptors that they inherit."""


class ProcessRole(ABC):
    """The processes of a role, on one host of a run.

    Args:
        config: What to run.
    """

    name = ""
    """The extension's name."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @abstractmethod
    def reserve(self) -> AgreedProcesses:
        """Reserve the addresses of all processes of a run on one host.

        Raises `ConfigError` if an address that the user has given is not free.
        """

    @abstractmethod
    def describe(self) -> "RoleFacts":
        """Return what this host sends of the role when it joins."""

    @abstractmethod
    def agree(self, hosts: JoinedHosts) -> AgreedProcesses:
        """On host 0 of several: place the processes, and let each host reserve the addresses of its own.

        Raises:
            JoinError: The hosts cannot have these processes, or one does not answer. The other hosts receive it too.
            ConfigError: The same for this host.
            RendezvousInterrupted: On a signal.
        """

    @abstractmethod
    def answer(self, outward: str, content: Any) -> Any:
        """On another host than host 0: do what host 0's `agree` requests, and return what to send it.

        Args:
            outward: This host's address on its route to host 0.
            content: What host 0 has sent, as plain values.
        """

    @abstractmethod
    def list_ports(self, agreed: AgreedProcesses) -> "list[UsedPort]":
        """Return the ports that the processes will have, for the test of ports between hosts."""

    @abstractmethod
    def attach(self, host: RoleHost, folder: str) -> WorkerContent:
        """Prepare the processes of this host, with log files in its `folder`, and return what its workers need."""

    @abstractmethod
    def start(self, interrupts: Interrupts, *, on_wait: Callable[[], None]) -> None:
        """Start the processes of this host, and wait until they serve. Call `on_wait` several times a second meanwhile.

        The role has a deadline of its own, because the other hosts wait for this one.

        Raises `LaunchError` if one does not serve, `RendezvousInterrupted` on a signal, and what `on_wait` raises. No
        process of the role is alive then.
        """

    @abstractmethod
    def list_rows(self) -> Sequence[ProcessRow]:
        """Return what each process of this host is, at present."""

    @abstractmethod
    def poll(self) -> Sequence[AnyRecord]:
        """Return what has happened to processes since the last call. May start some again."""

    @abstractmethod
    def list_process_ids(self) -> frozenset[int]:
        """Return the ids of all processes of this host, with their children."""

    @abstractmethod
    def stop(self, on_wait: Callable[[], object]) -> None:
        """End all processes of this host. Call `on_wait` meanwhile."""

    @abstractmethod
    def release(self) -> None:
        """Release addresses and descriptors."""

    @property
    def warning(self) -> str:
        """A line for the user at the start; "" for none."""
        return ""

    def cover_hosts(self, records: Sequence[AnyRecord]) -> Sequence[AnyRecord]:
        """Return records of lost hosts, and say in them whether other hosts have what the role had there."""
        return records

    def cover_processes(self, records: Sequence[AnyRecord]) -> Sequence[AnyRecord]:
        """Return records of ended processes of the role, and say in them whether the run continues without them."""
        return records

    def tick(self) -> None:
        """Take what the role's other hosts have sent. Called several times a second."""
        return


def make_roles(config: RunConfig) -> tuple[ProcessRole, ...]:
    """Return the roles of a run: none for most runs."""
    found = []
    for name in config.roles:
        extension = find_extension(name)
        assert extension is not None
        assert extension.role is not None
        make: Callable[[RunConfig], ProcessRole] = import_declared(
            name, "role.module", extension.role.module, name="make_role"
        )
        found.append(make(config))
    return tuple(found)


@contextlib.contextmanager
def open_roles(config: RunConfig) -> Iterator[tuple[ProcessRole, ...]]:
    """Yield the roles of a run, whose addresses and descriptors are released at the end."""
    with contextlib.ExitStack() as stack:
        roles = make_roles(config)
        for role in roles:
            stack.callback(role.release)
        yield roles

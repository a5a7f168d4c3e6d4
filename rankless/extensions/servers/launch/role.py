"""The role of parameter servers: what `launch.extension_process_role` says of a role, for the servers of one host.

Host 0 decides which servers are lost for good, and whether others have their tables, because it attributes failures
(`LostServers`). It tells the other hosts, and each agent tells its workers through memory. See Note [copies of servers]
in `extensions.servers.config`.
"""

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import msgspec

from rankless.config.run_config import AgreedJobConfig, AgreedProcesses, RunConfig
from rankless.extensions.servers.config import (
    NAME,
    SERVER_ROLE,
    RequestedServers,
    ServersConfig,
    find_original,
    find_partner,
    make_servers_config,
    mark_lost,
    open_lost_servers,
    parse_server_address,
)
from rankless.extensions.servers.launch.addresses import reserve_server_addresses
from rankless.extensions.servers.launch.host_agreement import agree_on_servers, answer_reservation
from rankless.extensions.servers.launch.options import find_requested
from rankless.extensions.servers.launch.processes import ServerProcesses
from rankless.extensions.servers.launch.server_hosts import describe_servers, find_own_servers
from rankless.extensions.servers.launch.server_process import make_server_launches
from rankless.launch.extension_process_role import JoinedHosts, ProcessRole, RoleHost, WorkerContent
from rankless.launch.other_hosts_interface import Peers
from rankless.launch.rendezvous.host_consistency import RoleFacts
from rankless.launch.rendezvous.job_token import derive_role_token
from rankless.launch.rendezvous.other_hosts_during_run import FollowerPeers, LeaderPeer
from rankless.launch.signal_reader import Interrupts, name_signal
from rankless.records.events import NO_RANK, AnyRecord, HostLost, Notice, ProcessExited, ProcessLost
from rankless.records.host_connection_tests import UsedPort
from rankless.records.live_run import ProcessRow


class LostServers:
    """The lost servers of a run, as one host knows them. Without copies it does nothing.

    Args:
        servers: The servers as workers see them; None for a run without.
        start: The run's hosts.
        names: The name of every host.
        peers: The other hosts.
    """

    def __init__(
        self,
        servers: ServersConfig | None,
        start: AgreedJobConfig,
        *,
        names: Sequence[str],
        peers: Peers,
    ) -> None:
        self._parts = 0 if servers is None or not servers.replicas else servers.part_count
        self._hosts = start.roles[NAME].hosts if NAME in start.roles else ()
        self._workers, self._names, self._peers = start.workers, names, peers
        self._lost: set[int] = set()
        self.descriptor = open_lost_servers(2 * self._parts) if self._parts else None
        """The memory from which this host's workers learn of lost servers; None without copies."""

    @property
    def warning(self) -> str:
        """A line for the user if no loss of a host is covered; "" otherwise."""
        if not self._parts or len(set(self._hosts)) > 1:
            return ""
        return "each server has a copy on this host: that covers a lost server, and not a lost host"

    def cover_hosts(self, records: Sequence[AnyRecord]) -> Sequence[AnyRecord]:
        """Return records of lost hosts, which say whether other hosts have the tables of their servers.

        Other hosts than host 0 return them as they are.
        """
        judged: list[AnyRecord] = []
        for record in records:
            judged += self._judge_host(record) if isinstance(record, HostLost) and self._decides else [record]
        return judged

    def cover_processes(self, records: Sequence[AnyRecord]) -> Sequence[AnyRecord]:
        """Return records of ended servers, which say whether the run continues without them.

        Other hosts than host 0 return them as they are.
        """
        judged: list[AnyRecord] = []
        for record in records:
            judged += self._judge_exit(record) if isinstance(record, ProcessExited) and self._decides else [record]
        return judged

    def tick(self) -> None:
        """Tell the workers of this host what host 0 has said."""
        if isinstance(self._peers, LeaderPeer):
            self._mark({server for lost in self._peers.take_role_contents(NAME) for server in lost} - self._lost)

    def close(self) -> None:
        """Release the memory."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    @property
    def _decides(self) -> bool:
        return self._parts > 0 and self._peers.attributes_failures

    def _judge_exit(self, record: ProcessExited) -> Iterable[AnyRecord]:
        if record.is_restarted or record.number in self._lost:
            return [record]
        server, partner = record.number, find_partner(record.number, self._parts)
        if partner in self._lost:
            more = f"; server {partner}, which had the same tables, was lost before"
            return [msgspec.structs.replace(record, note=record.note + more)]
        code = record.exit_code
        how = f"was killed by {name_signal(-code)}" if code < 0 else f"ended with exit code {code}"
        where = f" on {self._names[self._hosts[server]]}" if len(self._names) > 1 else ""
        return [
            msgspec.structs.replace(record, is_covered=True),
            *self._lose([server], f"server {server}{where} {how}{record.note}; the run continues"),
        ]

    def _judge_host(self, record: HostLost) -> Iterable[AnyRecord]:
        """Go on without the servers of a host, if other hosts have their tables, and without a host of servers alone.

        `elastic.survivors` decides whether the run continues without its workers.
        """
        host = record.host_index
        if host is None:
            return [record]
        servers = [server for server, each in enumerate(self._hosts) if each == host and server not in self._lost]
        for server in servers:
            partner = find_partner(server, self._parts)
            if partner in self._lost or self._hosts[partner] == host:
                first, second = sorted((server, partner))
                more = f"; servers {first} and {second}, which had the same tables, are lost"
                return [msgspec.structs.replace(record, how=record.how + more)]
        has_workers = self._workers[host] > 0
        if has_workers and not servers:
            return [msgspec.structs.replace(record, are_processes_covered=True)]
        how = "its tables continue" if has_workers else "the run continues"
        covered = msgspec.structs.replace(record, is_covered=not has_workers, are_processes_covered=True)
        return [covered, *self._lose(servers, f"host {record.host} {record.how}; {how}")]

    def _lose(self, servers: Sequence[int], how: str) -> Iterable[AnyRecord]:
        self._mark(servers)
        if isinstance(self._peers, FollowerPeers):
            self._peers.send_to_role(NAME, sorted(self._lost))
        others = ", ".join(map(self._describe_partner, servers))
        text = how + (f" with {others}" if others else "")
        now = time.monotonic_ns()
        yield from (ProcessLost(rank=NO_RANK, time_ns=now, role=SERVER_ROLE, number=server) for server in servers)
        yield Notice(rank=NO_RANK, time_ns=now, text=text)

    def _describe_partner(self, lost: int) -> str:
        original, partner = find_original(lost, self._parts), find_partner(lost, self._parts)
        if original is None:
            return f"server {partner} in place of server {lost}"
        return f"server {partner} without a copy"

    def _mark(self, servers: Collection[int]) -> None:
        for server in servers:
            self._lost.add(server)
            if self.descriptor is not None:
                mark_lost(self.descriptor, server)


def make_role(config: RunConfig) -> "ServersRole":
    """Return the servers of a run with `--servers`, on this host."""
    requested = find_requested(config.request)
    assert requested is not None
    return ServersRole(config, requested)


class ServersRole(ProcessRole):
    """The parameter servers of a run, on one of its hosts.

    Args:
        config: What to run.
        requested: The servers that the user requests.
    """

    name = NAME

    def __init__(self, config: RunConfig, requested: RequestedServers) -> None:
        super().__init__(config)
        self._requested = requested
        self._held = contextlib.ExitStack()
        self._on_one_host: ServersConfig | None = None
        self._processes = ServerProcesses((), max_restarts=0)
        self._lost: LostServers | None = None

    def reserve(self) -> AgreedProcesses:
        """See `ProcessRole`."""
        self._on_one_host = self._held.enter_context(reserve_server_addresses(self._requested))
        addresses = self._on_one_host.addresses
        return AgreedProcesses(
            addresses=addresses, hosts=(0,) * len(addresses), role=SERVER_ROLE, replicas=self._requested.replicas
        )

    def describe(self) -> RoleFacts:
        """See `ProcessRole`."""
        return RoleFacts(requested=describe_servers(self._requested), own=find_own_servers(self._requested))

    def agree(self, hosts: JoinedHosts) -> AgreedProcesses:
        """See `ProcessRole`."""
        return agree_on_servers(self.name, self._requested, self._held, hosts)

    def answer(self, outward: str, content: Any) -> Any:
        """See `ProcessRole`."""
        return answer_reservation(content, self._held, outward)

    def list_ports(self, agreed: AgreedProcesses) -> list[UsedPort]:
        """See `ProcessRole`."""
        found = []
        for index, (host, text) in enumerate(zip(agreed.hosts, agreed.addresses, strict=True)):
            address, port = parse_server_address(text)
            found.append(UsedPort(host_index=host, address=address, port=port, use=f"server {index}"))
        return found

    def attach(self, host: RoleHost, folder: str) -> WorkerContent:
        """See `ProcessRole`."""
        agreed, servers = host.start.roles[self.name], self._on_one_host
        if servers is None:
            assert host.token is not None
            token = derive_role_token(host.token, self.name, agreed.salt)
            servers = make_servers_config(self._requested, agreed.addresses, token)
        self._lost = LostServers(servers, host.start, names=host.names, peers=host.peers)
        self._processes = ServerProcesses(
            make_server_launches(host.profile, host.start, servers, folder=folder, host_index=host.host_index),
            max_restarts=self._requested.max_restarts,
        )
        descriptor = self._lost.descriptor
        content = msgspec.structs.replace(servers, lost_descriptor=descriptor)
        return WorkerContent(
            roles={self.name: msgspec.to_builtins(content)},
            descriptors=() if descriptor is None else (descriptor,),
        )

    def start(self, interrupts: Interrupts, *, on_wait: Callable[[], None]) -> None:
        """See `ProcessRole`."""
        self._processes.start(interrupts, on_wait=on_wait)

    def list_rows(self) -> Sequence[ProcessRow]:
        """See `ProcessRole`."""
        return self._processes.list_rows()

    def poll(self) -> Sequence[AnyRecord]:
        """See `ProcessRole`."""
        return self._processes.poll()

    def list_process_ids(self) -> frozenset[int]:
        """See `ProcessRole`."""
        return self._processes.list_process_ids()

    def stop(self, on_wait: Callable[[], object]) -> None:
        """See `ProcessRole`."""
        self._processes.close(on_wait)

    def release(self) -> None:
        """See `ProcessRole`."""
        if self._lost is not None:
            self._lost.close()
        self._held.close()

    @property
    def warning(self) -> str:
        """See `ProcessRole`."""
        return "" if self._lost is None else self._lost.warning

    def cover_hosts(self, records: Sequence[AnyRecord]) -> Sequence[AnyRecord]:
        """See `ProcessRole`."""
        return records if self._lost is None else self._lost.cover_hosts(records)

    def cover_processes(self, records: Sequence[AnyRecord]) -> Sequence[AnyRecord]:
        """See `ProcessRole`."""
        return records if self._lost is None else self._lost.cover_processes(records)

    def tick(self) -> None:
        """See `ProcessRole`."""
        if self._lost is not None:
            self._lost.tick()

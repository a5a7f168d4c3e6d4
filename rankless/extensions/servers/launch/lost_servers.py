"""Which servers of a run are lost for good, and whether others have their tables, so that the run continues.

Host 0 decides it (`LostServers.cover_hosts` and `cover_processes`), because it attributes failures. It tells the other
hosts, and each agent tells its workers through memory (`extensions.servers.lost_memory`). See Note [copies of servers]
in `extensions.servers.config`.
"""

import os
import time
from collections.abc import Collection, Iterable, Sequence

import msgspec

from rankless.config.run_config import AgreedJobConfig
from rankless.extensions.servers.config import NAME, SERVER_ROLE, ServersConfig, find_original, find_partner
from rankless.extensions.servers.lost_memory import mark_lost, open_lost_servers
from rankless.launch.peers import Peers
from rankless.launch.rendezvous.peers import FollowerPeers, LeaderPeer
from rankless.launch.signals import name_signal
from rankless.records.events import NO_RANK, AnyRecord, HostLost, Notice, ProcessExited, ProcessLost


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

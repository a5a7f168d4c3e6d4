"""The role of parameter servers: what `rankless.launch.roles` says of a role, for the servers of one host."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rankless.config.run_config import AgreedProcesses, RunConfig
from rankless.extensions.servers.config import (
    NAME,
    SERVER_ROLE,
    RequestedServers,
    ServersConfig,
    make_servers_config,
    parse_server_address,
)
from rankless.extensions.servers.launch.addresses import reserve_server_addresses
from rankless.extensions.servers.launch.host_agreement import agree_on_servers, answer_reservation
from rankless.extensions.servers.launch.lost_servers import LostServers
from rankless.extensions.servers.launch.options import find_requested
from rankless.extensions.servers.launch.processes import ServerProcesses
from rankless.extensions.servers.launch.server_hosts import describe_servers, find_own_servers
from rankless.extensions.servers.launch.server_launches import make_server_launches
from rankless.launch.rendezvous.host_facts import RoleFacts
from rankless.launch.rendezvous.job_token import derive_role_token
from rankless.launch.roles import JoinedHosts, ProcessRole, RoleHost, WorkerContent
from rankless.launch.signals import Interrupts
from rankless.records.connection_attempts import UsedPort
from rankless.records.events import AnyRecord
from rankless.records.live_run import ProcessRow


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

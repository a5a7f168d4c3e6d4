"""All workers of an elastic job: those of this host, and those of each other host."""

import os
import secrets
import selectors
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from rankless.config.environment import exported_variables, loopback_name, user_interfaces
from rankless.config.hosts_and_addresses import LOOPBACK, interface_of, is_here
from rankless.config.run_config import AgreedJobConfig, Elastic, RunConfig
from rankless.extensions.horovodrun.elastic.local_workers import LocalWorkers
from rankless.extensions.horovodrun.elastic.remote_workers import RemoteWorkers
from rankless.extensions.horovodrun.elastic.ssh_protocol import HostTask
from rankless.launch.authenticated_tcp_store import StoreServer
from rankless.launch.launcher_profile import LauncherProfile
from rankless.launch.ports import open_store_socket
from rankless.launch.recovery.membership import ElasticWorker, RoundState
from rankless.launch.worker_configs import ElasticSlot, make_elastic_worker
from rankless.launch.worker_output import Source, WorkerOutputFollower, Write
from rankless.records.elastic_driver_protocol import DriverMessage, RoundEnded, RoundStarted, WorkerMessage
from rankless.records.events import AnyRecord


@dataclass(frozen=True, kw_only=True)
class LaunchContext:
    """What the driver needs to start workers."""

    config: RunConfig
    profile: LauncherProfile
    elastic: Elastic
    start: AgreedJobConfig
    folder: str
    notify: Callable[[str], None]
    writes: Mapping[Source, Write]


class AllWorkers:
    """All workers by their numbers, on all hosts."""

    def __init__(self, context: LaunchContext, selector: selectors.BaseSelector) -> None:
        self._context = context
        self._selector = selector
        self._terminal = WorkerOutputFollower([], writers=context.writes)
        log_path = os.path.join(context.folder, "parent.log")
        self._local = LocalWorkers(context.config, log_path=log_path, selector=selector)
        self._remote: dict[str, RemoteWorkers] = {}
        self._host_of: dict[int, LocalWorkers | RemoteWorkers] = {}
        self._is_ending = False
        self._store_token = secrets.token_hex(32)
        self._store = StoreServer([], token=self._store_token)
        self._store_ports: dict[str, int] = {}
        """The ports at which the driver serves the store of the rounds, by its addresses."""

    def start(self, worker: ElasticWorker) -> None:
        """Start a worker."""
        if not is_here(worker.host):
            remote = self._remote.get(worker.host) or self._connect(worker.host)
            self._host_of[worker.number] = remote
            remote.start(worker)
            return
        context = self._context
        self._host_of[worker.number] = self._local
        slot = ElasticSlot(number=worker.number, host=worker.host, slot=worker.slot, store_token=self._store_token)
        profile = context.profile
        launch = make_elastic_worker(
            context.config, profile, context.start, slot, folder=context.folder, interface=None
        )
        for stream in profile.shown_streams(context.config, context.folder, [launch.config]):
            self._terminal.add(stream)
        self._local.start(launch)

    def send(self, number: int, message: DriverMessage, current: RoundState | None) -> None:
        """Send a message to a worker. The start of a round gets the address and the interface of its members."""
        if isinstance(message, RoundStarted) and current is not None:
            message = self._add_address(message, number, current)
        elif isinstance(message, RoundEnded):
            self._store.end_round(message.round)
        self._host_of[number].send(number, message)

    def kill_if_stalled(self, number: int, reason: str) -> None:
        """Kill one worker as soon as it makes no progress. A worker that computes is left alone."""
        self._host_of[number].kill_if_stalled(number, reason)

    def poll(self) -> Iterator[tuple[int, WorkerMessage] | AnyRecord]:
        """Yield new messages and records."""
        self._terminal.pump()
        yield from self._local.poll()
        for host, remote in list(self._remote.items()):
            yield from remote.poll()
            if remote.is_lost:
                if not self._is_ending:
                    workers = f", and with it {_format_workers(remote.lost_workers)}" if remote.lost_workers else ""
                    self._context.notify(f"host {host} is lost{workers}: {remote.explain_loss()}")
                remote.close()
                del self._remote[host]

    def signal(self, number: int) -> None:
        """Send a signal to all workers, and start no others."""
        self._is_ending = True
        for workers in self._all_hosts():
            workers.signal(number)

    def kill(self) -> None:
        """Kill all workers."""
        for workers in self._all_hosts():
            workers.kill()

    def is_broken(self) -> bool:
        """Whether this host can start no workers any more."""
        return self._local.has_ended()

    def have_ended(self) -> bool:
        """Whether no worker is alive on any host."""
        return self._local.has_ended() and all(remote.has_ended() for remote in self._remote.values())

    def close(self) -> None:
        """End all processes on all hosts."""
        for workers in self._all_hosts():
            workers.close()
        self._store.close()
        self._terminal.close()

    def _all_hosts(self) -> list[LocalWorkers | RemoteWorkers]:
        return [self._local, *self._remote.values()]

    def _connect(self, host: str) -> RemoteWorkers:
        context = self._context
        task = HostTask(
            program=context.config.program,
            request=msgspec.structs.replace(context.config.request, seed=context.config.seed),
            start=context.start,
            folder=context.folder,
            environment=exported_variables(),
            store_token=self._store_token,
        )
        remote = RemoteWorkers(host, task, context.elastic, selector=self._selector, writes=context.writes)
        self._remote[host] = remote
        return remote

    def _add_address(self, message: RoundStarted, number: int, current: RoundState) -> RoundStarted:
        """Add rank 0's address, the receiver's interface, and the address at which it reaches the store.

        All are loopback if all members are on this host, else those by which the hosts reach each other.
        """
        first = next(member for member, each in current.assignments.items() if each.rank == 0)
        hosts = {self._host_of[member] for member in current.assignments}
        agents = [host.agent for host in hosts if isinstance(host, RemoteWorkers) and host.agent is not None]
        own_address = agents[0].driver_address if agents else LOOPBACK
        own_interface = interface_of(own_address) if agents else loopback_name()

        def find_address(member: int) -> tuple[str, str]:
            host = self._host_of[member]
            if isinstance(host, RemoteWorkers) and host.agent is not None:
                return host.agent.address, host.agent.interface
            return own_address, own_interface

        return msgspec.structs.replace(
            message,
            address=find_address(first)[0],
            interface=None if self._has_user_interface() else find_address(number)[1],
            store=self._serve_store(self._host_of[number]),
        )

    def _serve_store(self, host: LocalWorkers | RemoteWorkers) -> tuple[str, int]:
        """Return the address and the port at which workers of a host reach the store, and serve it there."""
        agent = host.agent if isinstance(host, RemoteWorkers) else None
        address = LOOPBACK if agent is None else agent.driver_address
        if address not in self._store_ports:
            try:
                listening = open_store_socket(address)
            except OSError:  # the other host knows this one by an address that it does not have, as behind a router
                listening = open_store_socket("::" if ":" in address else "")
            self._store_ports[address] = int(listening.getsockname()[1])
            self._store.listen(listening)
        return address, self._store_ports[address]

    def _has_user_interface(self) -> bool:
        return self._context.elastic.has_chosen_interface or "GLOO_SOCKET_IFNAME" in user_interfaces()


def _format_workers(numbers: Sequence[int]) -> str:
    return f"worker{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"

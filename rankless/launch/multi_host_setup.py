"""Set up a run on several hosts: as host 0, which decides what all have in common, or as another host."""

import contextlib
import errno
import functools
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import msgspec

from rankless.config import environment
from rankless.config.hosts_and_addresses import (
    addresses_of,
    interface_of,
    interface_towards,
    is_loopback,
    is_own_loopback_name,
    listen_on,
    outward_addresses,
    own_addresses,
)
from rankless.config.run_config import AgreedJobConfig, Cluster, RunConfig
from rankless.errors import ConfigError, JoinError
from rankless.launch.authenticated_tcp_store import StoreServer
from rankless.launch.doctor.preflight_and_host_checks import run_preflight
from rankless.launch.extension_process_role import JoinedHosts, ProcessRole, open_roles
from rankless.launch.launcher_profile import LauncherProfile
from rankless.launch.ports import describe_port_owner, open_store_socket, reserve_master_port
from rankless.launch.prepare_run import ReadyJob, make_start
from rankless.launch.rendezvous.control_server import ControlServer
from rankless.launch.rendezvous.follower import join_leader
from rankless.launch.rendezvous.host_consistency import HostFacts, collect_host_facts
from rankless.launch.rendezvous.job_token import (
    DeliveredToken,
    FixedToken,
    derive_store_token,
    make_follower_token_source,
    make_leader_token,
    needs_token_delivery,
)
from rankless.launch.rendezvous.messages import ControlMessage, RoleMessage
from rankless.launch.rendezvous.other_hosts_during_run import FollowerPeers, LeaderPeer
from rankless.launch.rendezvous.port_test import PortTest, run_port_test
from rankless.launch.rendezvous.ssh import RemoteTask, SshAgent, SshTokenDelivery
from rankless.launch.rendezvous.wait_for_hosts import start_hosts, wait_for_hosts
from rankless.launch.signal_reader import Interrupts
from rankless.records.host_connection_tests import UsedPort

_ANYWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses of no host (RFC 5737, RFC 3849): the route to them is the default route. Nothing is sent there."""


@dataclass(frozen=True, kw_only=True)
class _SetupRequest:
    """What assembling a job on several hosts needs besides the `RunConfig`."""

    profile: LauncherProfile
    cluster: Cluster
    interrupts: Interrupts
    notify: Callable[[str], None]
    token: bytes | None


def set_up_job_on_hosts(
    config: RunConfig,
    profile: LauncherProfile,
    cluster: Cluster,
    *,
    interrupts: Interrupts,
    notify: Callable[[str], None],
    token: bytes | None,
) -> AbstractContextManager[ReadyJob]:
    """Return a context manager that yields the job once all its hosts are there.

    Raises `JoinError` if a host does not join in time, and `RendezvousInterrupted` on a signal.
    """
    run_preflight(config, notify)
    request = _SetupRequest(profile=profile, cluster=cluster, interrupts=interrupts, notify=notify, token=token)
    set_up = _set_up_as_leader if cluster.host_index == 0 else _set_up_as_follower
    return set_up(config, request)


def _find_own_address(cluster: Cluster, notify: Callable[[str], None]) -> tuple[str | None, str]:
    """Return the interface and the address at which other hosts reach host 0, which is this one."""
    interface, address = own_address(cluster)
    if is_own_loopback_name(cluster.hosts[0].address) and not is_loopback(address):
        notify(f"the name {cluster.hosts[0].address} is a loopback address here: host 0 listens on {address}")
    return interface, address


@contextlib.contextmanager
def _set_up_as_leader(config: RunConfig, request: _SetupRequest) -> Iterator[ReadyJob]:
    cluster, notify = request.cluster, request.notify
    require_own_name(cluster)
    environment.apply(cluster.variables)
    token = make_leader_token(cluster) if request.token is None else request.token
    interface, address = _find_own_address(cluster, notify)
    with contextlib.ExitStack() as stack:
        roles = stack.enter_context(open_roles(config))
        own = _collect_facts(config, cluster, address, roles)
        if cluster.agent_start == "slurm":
            stack.callback(DeliveredToken(cluster).discard)
        server = ControlServer(_listen(address, cluster), token=token, host_count=len(cluster.hosts))
        stack.callback(server.close)
        starters = _start_agents(config, request, token, stack)
        listening = stack.enter_context(open_store_socket(address))
        reserved = stack.enter_context(reserve_master_port())
        joined = wait_for_hosts(
            server, cluster, own=own, starters=starters, interrupts=request.interrupts, notify=notify
        )
        facts = [own, *(joined[host] for host in sorted(joined))]
        devices = [config.devices, *(each.devices for each in facts[1:])]
        addresses = [_address(cluster, host, facts, own=address) for host in range(len(cluster.hosts))]
        start = make_start(config, request.profile, devices, store=listening, reserved=reserved)
        services = request.profile.open_services(
            config, addresses=addresses, worker_counts=start.workers, store_address=start.store_address
        )
        start = msgspec.structs.replace(
            start,
            addresses=tuple(each.address for each in facts),
            launcher_variables=stack.enter_context(services),
        )
        names = [cluster.hosts[0].address, *(_name(cluster, host, facts) for host in range(1, len(facts)))]
        hosts = JoinedHosts(server=server, facts=facts, names=names, interrupts=request.interrupts)
        start = msgspec.structs.replace(start, roles={role.name: role.agree(hosts) for role in roles})
        ports = [port for role in roles for port in role.list_ports(start.roles[role.name])]
        _test_ports(hosts, request, start, listening, ports)
        store_token = derive_store_token(token, start.run_id)
        start_hosts(server, start)
        yield ReadyJob(
            peers=FollowerPeers(server, start, names),
            start=start,
            profile=request.profile,
            names=names,
            devices=devices,
            interface=interface,
            store=stack.enter_context(StoreServer([listening], token=store_token)),
            store_token=store_token,
            roles=roles,
            token=token,
        )


@contextlib.contextmanager
def _set_up_as_follower(config: RunConfig, request: _SetupRequest) -> Iterator[ReadyJob]:
    cluster, token = request.cluster, request.token
    tokens = make_follower_token_source(cluster) if token is None else FixedToken(token)

    def collect_facts() -> HostFacts:
        _, address = interface_towards(cluster.hosts[0].address)
        return _collect_facts(config, cluster, address, roles)

    with open_roles(config) as roles:
        joined = join_leader(
            cluster,
            collect_facts,
            tokens,
            interrupts=request.interrupts,
            notify=request.notify,
            answer=functools.partial(_answer, {role.name: role for role in roles}),
        )
        job = joined.started
        try:
            interface, _ = interface_towards(cluster.hosts[0].address)
            name = cluster.hosts[job.host_index].address
            yield ReadyJob(
                peers=LeaderPeer(joined.leader, job.start, job.host_index, name),
                start=job.start,
                profile=request.profile,
                host_index=job.host_index,
                names=[host.address for host in cluster.hosts],
                devices=(config.devices,),
                interface=interface,
                store_token=derive_store_token(joined.token, job.start.run_id),
                roles=roles,
                token=joined.token,
            )
        finally:
            joined.leader.close()


def _answer(roles: Mapping[str, ProcessRole], outward: str, message: ControlMessage) -> RoleMessage | None:
    """Let a role do what host 0's requests, and return what to send it. Ignore other messages."""
    role = roles.get(message.role) if isinstance(message, RoleMessage) else None
    if role is None or not isinstance(message, RoleMessage):
        return None
    return RoleMessage(role=role.name, content=role.answer(outward, message.content))


def require_own_name(cluster: Cluster) -> None:
    """Raise `ConfigError` unless host 0's name is one of this host's."""
    if not addresses_of(cluster.hosts[0].address) & own_addresses():
        raise ConfigError(
            expected=f"host 0, the master, on the host that is called {cluster.hosts[0]}",
            found="this host, which has no such address"
            if addresses_of(cluster.hosts[0].address)
            else f"{cluster.hosts[0].address}, which does not resolve here",
            fix="give this host another number: --node-rank 0 (--host-rank 0, --rank 0) is the master's host; or name "
            "this host as the master",
        )


def own_address(cluster: Cluster) -> tuple[str, str]:
    """Return host 0's network interface, and its address there that the other hosts reach.

    Raises `ConfigError` if no route leads from here to them.
    """
    outward = sorted(each for each in addresses_of(cluster.hosts[0].address) if not is_loopback(each))
    # On Debian a host's own name is a loopback address. The route to another host then gives the address.
    target = cluster.hosts[1 if cluster.is_listed else 0].address
    try:
        if not outward and not cluster.is_listed and is_own_loopback_name(target):
            return _default_address(target)
        return (interface_of(outward[0]), outward[0]) if outward else interface_towards(target)
    except OSError as error:
        raise ConfigError(
            expected=f"a route from host 0 to {target}",
            found=error.strerror or str(error),
            fix="check that the names resolve and the network is up: rankless doctor --hosts …",
        ) from None


def _default_address(name: str) -> tuple[str, str]:
    """Return interface and address of host 0 where its name is a loopback address, and no other host is known yet.

    Raises `ConfigError` if it has several addresses, and none of them is on the default route.
    """
    outward = outward_addresses()
    if len(outward) == 1:
        return interface_of(outward[0]), outward[0]
    for anywhere in _ANYWHERE:
        with contextlib.suppress(OSError):
            interface, address = interface_towards(anywhere)
            if address in outward:
                return interface, address
    raise ConfigError(
        expected=f"a name of host 0 under which the other hosts reach it: {name}",
        found=f"{', '.join(sorted(addresses_of(name)))} here, and its addresses are {', '.join(outward) or 'none'}",
        fix="give one of those addresses instead of the name, on every host; or correct the name in /etc/hosts",
    )


def _listen(address: str, cluster: Cluster) -> socket.socket:
    try:
        return listen_on(address, cluster.port)
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        found = (
            f"taken by {describe_port_owner(cluster.port) or 'a connection that lingers'}"
            if is_taken
            else error.strerror
        )
        raise JoinError(
            expected=f"port {cluster.port} of {address} to be free, because the other hosts connect to it",
            found=found,
            fix="end the process that has it, or choose another with --port (port=, --master), on every host",
        ) from None


def _test_ports(
    hosts: JoinedHosts, request: _SetupRequest, start: AgreedJobConfig, store: socket.socket, ports: Sequence[UsedPort]
) -> None:
    """Let the hosts try the ports of all processes, unless the user does not want that."""
    if environment.wants_port_test():
        test = PortTest(
            names=hosts.names,
            address=start.store_address,
            control_port=request.cluster.port,
            master_port=start.master_port,
            store=store,
            workers=start.workers,
            ports=ports,
        )
        run_port_test(hosts.server, test, interrupts=request.interrupts, notify=request.notify)


def _start_agents(
    config: RunConfig, request: _SetupRequest, token: bytes, stack: contextlib.ExitStack
) -> Mapping[int, SshAgent | SshTokenDelivery]:
    """Start the agents of the other hosts by ssh, or bring the token there, if that is host 0's part.

    `stack` closes what does that.
    """
    cluster = request.cluster
    followers = range(1, len(cluster.hosts))
    starters: dict[int, SshAgent | SshTokenDelivery] = {}
    if cluster.agent_start == "ssh":
        for host in followers:
            starters[host] = SshAgent(_make_task(config, request, host, token), notify=request.notify)
    elif needs_token_delivery(cluster):
        starters = {host: SshTokenDelivery(cluster, host, token) for host in followers}
    for starter in starters.values():
        stack.callback(starter.close)
    return starters


def _make_task(config: RunConfig, request: _SetupRequest, host_index: int, token: bytes) -> RemoteTask:
    """Return what the agent of another host receives when ssh starts it."""
    cluster = request.cluster
    own_cluster = msgspec.structs.replace(cluster, host_index=host_index)
    script = None
    if cluster.copies and config.program.kind == "script":
        with open(config.program.target, "rb") as file:
            script = file.read()
    exports = request.profile.exports_environment
    carried = environment.exported_variables() if exports else environment.carried_variables()
    return RemoteTask(
        program=config.program,
        request=msgspec.structs.replace(config.request, cluster=own_cluster, seed=config.seed),
        token=token,
        environment=carried | dict(cluster.variables),
        script=script,
    )


def _collect_facts(config: RunConfig, cluster: Cluster, address: str, roles: Sequence[ProcessRole]) -> HostFacts:
    kinds = [f" ({host.heterogeneous} heterogeneous)" if host.heterogeneous else "" for host in cluster.hosts]
    counts = [f"{host.workers}{kind}" for host, kind in zip(cluster.hosts, kinds, strict=True)]
    known = [f"{host.address}:{count}" for host, count in zip(cluster.hosts, counts, strict=True)]
    if not cluster.is_listed:
        known = [f"{len(counts)} hosts" + (f" of {counts[0]} workers" if kinds[0] else "")]
    return collect_host_facts(
        config.program,
        hosts=known,
        devices=config.devices,
        address=address,
        roles={role.name: role.describe() for role in roles},
    )


def _name(cluster: Cluster, host_index: int, facts: Sequence[HostFacts]) -> str:
    return cluster.hosts[host_index].address if cluster.is_listed else facts[host_index].name


def _address(cluster: Cluster, host_index: int, facts: Sequence[HostFacts], *, own: str) -> str:
    if cluster.is_listed:
        return cluster.hosts[host_index].address
    return own if host_index == 0 else facts[host_index].address

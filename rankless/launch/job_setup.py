"""From a plan to a job all of whose hosts are there: alone, as host 0, or as one of the others."""

import contextlib
import errno
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import msgspec

from rankless.config import environment
from rankless.config.hosts import addresses_of, interface_of, interface_towards, is_loopback, own_addresses
from rankless.config.run_config import Cluster, JobStart, RunConfig
from rankless.config.validation import choose_backend
from rankless.errors import ConfigError, JoinError
from rankless.launch.doctor.preflight import run_preflight
from rankless.launch.log_files import make_run_id
from rankless.launch.ports import open_store_socket, owner_of, reserve_master_port
from rankless.launch.profile import load_profile
from rankless.launch.rendezvous.control_server import ControlServer
from rankless.launch.rendezvous.follower import join_leader
from rankless.launch.rendezvous.host_facts import HostFacts, collect_host_facts
from rankless.launch.rendezvous.job_token import (
    FixedToken,
    make_follower_token_source,
    make_leader_token,
    needs_token_delivery,
)
from rankless.launch.rendezvous.leader import start_hosts, wait_for_hosts
from rankless.launch.rendezvous.peers import FollowerPeers, LeaderPeer, NoPeers
from rankless.launch.rendezvous.ssh import RemoteTask, SshAgent, SshTokenDelivery
from rankless.launch.signals import Interrupts


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """A job whose hosts are there."""

    peers: NoPeers | FollowerPeers | LeaderPeer
    start: JobStart
    host_index: int = 0
    names: Sequence[str] = ("",)
    """Of the hosts."""
    devices: Sequence[Sequence[str]]
    """Of each host's workers, where they are known."""
    interface: str | None = None
    store: socket.socket | None = None
    """Host 0's, on which rank 0 will serve."""


@contextlib.contextmanager
def assembled(
    config: RunConfig, *, interrupts: Interrupts, tell: Callable[[str], None], token: bytes | None
) -> Iterator[Assembled]:
    """The job, once all its hosts are there. Raises JoinError if they do not come, and `gathering.Interrupted`."""
    if config.cluster is None:
        with contextlib.ExitStack() as stack:
            store = stack.enter_context(open_store_socket())
            reserved = stack.enter_context(reserve_master_port(config.master_port))
            start = _start(config, [config.devices], store=store, reserved=reserved)
            variables = stack.enter_context(_services(config, start, [config.master_address]))
            start = msgspec.structs.replace(start, launcher_variables=variables)
            yield Assembled(peers=NoPeers(), start=start, devices=(config.devices,), store=store)
        return
    run_preflight(config, tell)
    if config.cluster.host_index == 0:
        with _as_host_0(config, config.cluster, interrupts, tell, token) as found:
            yield found
    else:
        with _as_another(config, config.cluster, interrupts, tell, token) as found:
            yield found


@contextlib.contextmanager
def _as_host_0(
    config: RunConfig, cluster: Cluster, interrupts: Interrupts, tell: Callable[[str], None], token: bytes | None
) -> Iterator[Assembled]:
    require_own_name(cluster)
    environment.apply(cluster.variables)
    token = make_leader_token(cluster) if token is None else token
    interface, address = own_address(cluster)
    own = _facts(config, cluster, address)
    with contextlib.ExitStack() as stack:
        server = ControlServer(_listen(address, cluster), token=token, host_count=len(cluster.hosts))
        stack.callback(server.close)
        starters: Mapping[int, SshAgent | SshTokenDelivery] = {}
        if cluster.agent_start == "ssh":
            starters = {place: _started(config, cluster, place, token, tell) for place in range(1, len(cluster.hosts))}
        elif needs_token_delivery(cluster):
            starters = {place: SshTokenDelivery(cluster, place, token) for place in range(1, len(cluster.hosts))}
        for starter in starters.values():
            stack.callback(starter.close)
        store = stack.enter_context(open_store_socket(address))
        reserved = stack.enter_context(reserve_master_port())
        facts = wait_for_hosts(server, cluster, own=own, starters=starters, interrupts=interrupts, notify=tell)
        devices = [config.devices, *(facts[place].devices for place in sorted(facts))]
        addresses = [_address(cluster, place, facts, own=address) for place in range(len(cluster.hosts))]
        start = _start(config, devices, store=store, reserved=reserved)
        start = msgspec.structs.replace(
            start,
            addresses=(address, *(facts[place].address for place in sorted(facts))),
            launcher_variables=stack.enter_context(_services(config, start, addresses)),
        )
        start_hosts(server, start)
        names = [cluster.hosts[0].address, *(_name(cluster, place, facts) for place in sorted(facts))]
        peers = FollowerPeers(server, start, names)
        yield Assembled(peers=peers, start=start, names=names, devices=devices, interface=interface, store=store)


@contextlib.contextmanager
def _as_another(
    config: RunConfig, cluster: Cluster, interrupts: Interrupts, tell: Callable[[str], None], token: bytes | None
) -> Iterator[Assembled]:
    tokens = make_follower_token_source(cluster) if token is None else FixedToken(token)

    def facts() -> HostFacts:
        _, address = interface_towards(cluster.hosts[0].address)
        return _facts(config, cluster, address)

    connection, told = join_leader(cluster, facts, tokens, interrupts=interrupts, notify=tell)
    try:
        interface, _ = interface_towards(cluster.hosts[0].address)
        name = cluster.hosts[told.host_index].address
        names = [host.address for host in cluster.hosts]
        yield Assembled(
            peers=LeaderPeer(connection, told.start, told.host_index, name),
            start=told.start,
            host_index=told.host_index,
            names=names,
            devices=(config.devices,),
            interface=interface,
        )
    finally:
        connection.close()


def require_own_name(cluster: Cluster) -> None:
    """Raise ConfigError unless host 0's name is one of this host's."""
    if not addresses_of(cluster.hosts[0].address) & own_addresses():
        raise ConfigError(
            expected=f"host 0, the master, on the host that is called {cluster.hosts[0]}",
            found="this host, which has no such address",
            fix="--node-rank 0 (--host-rank 0, --rank 0) is the master's own host: number or name this one otherwise",
        )


def own_address(cluster: Cluster) -> tuple[str, str]:
    """Host 0's interface and the address on it that the others reach.

    Raises ConfigError where no way leads from here to them.
    """
    outward = sorted(each for each in addresses_of(cluster.hosts[0].address) if not is_loopback(each))
    # As Debian has it, a host's own name means itself alone, there; then the way to another host tells its address.
    towards = cluster.hosts[1 if cluster.is_listed else 0].address
    try:
        return (interface_of(outward[0]), outward[0]) if outward else interface_towards(towards)
    except OSError as error:
        raise ConfigError(
            expected=f"a way from host 0 to {towards}",
            found=error.strerror or str(error),
            fix="check that the names resolve and the network is up: rankless doctor --hosts …",
        ) from None


def _listen(address: str, cluster: Cluster) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, cluster.port), family=family, backlog=1024)
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        found = f"taken by {owner_of(cluster.port) or 'a connection that lingers'}" if is_taken else error.strerror
        raise JoinError(
            expected=f"port {cluster.port} of {address} to be free, for the other hosts to come to",
            found=found,
            fix="end what has it, or choose another with --port (port=, --master), on every host",
        ) from None


def _started(config: RunConfig, cluster: Cluster, place: int, token: bytes, tell: Callable[[str], None]) -> SshAgent:
    there = msgspec.structs.replace(cluster, host_index=place)
    script = None
    if cluster.copies and config.program.kind == "script":
        with open(config.program.target, "rb") as file:
            script = file.read()
    exports = load_profile(config.launcher).exports_environment
    carried = environment.exported_variables() if exports else environment.carried_variables()
    task = RemoteTask(
        program=config.program,
        request=msgspec.structs.replace(config.request, cluster=there, seed=config.seed),
        token=token,
        environment=carried | dict(cluster.variables),
        script=script,
    )
    return SshAgent(task, notify=tell)


def _facts(config: RunConfig, cluster: Cluster, address: str) -> HostFacts:
    hosts = [f"{host.address}:{host.workers}" for host in cluster.hosts]
    told = hosts if cluster.is_listed else [f"{len(hosts)} hosts"]
    return collect_host_facts(config.program, hosts=told, devices=config.devices, address=address)


def _name(cluster: Cluster, place: int, facts: Mapping[int, HostFacts]) -> str:
    return cluster.hosts[place].address if cluster.is_listed else facts[place].name


def _address(cluster: Cluster, place: int, facts: Mapping[int, HostFacts], *, own: str) -> str:
    if cluster.is_listed:
        return cluster.hosts[place].address
    return own if place == 0 else facts[place].address


def _services(
    config: RunConfig, start: JobStart, addresses: Sequence[str]
) -> AbstractContextManager[Mapping[str, str | None]]:
    return load_profile(config.launcher).open_services(
        config, addresses=addresses, worker_counts=start.workers, store_address=start.store_address
    )


def _start(
    config: RunConfig,
    devices: Sequence[Sequence[str]],
    *,
    store: socket.socket,
    reserved: socket.socket,
) -> JobStart:
    address = str(store.getsockname()[0])
    apart = [choose_backend(tuple(some)) for some in devices]
    return JobStart(
        run_id=make_run_id(config),
        seed=config.seed,
        workers=tuple(map(len, devices)),
        backend="nccl" if set(apart) == {"nccl"} else "gloo",
        master_address=config.master_address if config.cluster is None else address,
        master_port=reserved.getsockname()[1],
        store_address=address,
        store_port=store.getsockname()[1],
        recording=config.recording,
        perturbation_seed=config.perturbation_seed,
        dtype=config.dtype,
        observation=config.observation,
    )

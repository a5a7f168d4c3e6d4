"""Which hosts of a run have which parameter servers and workers, from the addresses that a user gives."""

from collections.abc import Sequence
from itertools import groupby

from rankless.config.hosts_and_addresses import (
    Endpoint,
    Host,
    addresses_of,
    is_here,
    is_loopback,
    own_addresses,
    parse_endpoint,
)
from rankless.config.run_config import UNKNOWN_HOST, Cluster
from rankless.errors import ConfigError
from rankless.extensions.servers.config import RequestedServers

_LOCALHOST = "localhost"


def find_worker_hosts(
    option: str,
    workers: Sequence[Endpoint],
    servers: Sequence[Endpoint],
    *,
    heterogeneous: Sequence[Endpoint] = (),
    heterogeneous_option: str = "--heter-workers",
) -> tuple[Host, ...]:
    """Return the hosts of a list of workers, in its order.

    After them come those that have heterogeneous workers alone, and last those that have servers and no worker.

    Args:
        option: The option that has the list, for errors.
        workers: The address of each worker that is not heterogeneous.
        servers: The address of each server.
        heterogeneous: The address of each heterogeneous worker.
        heterogeneous_option: The option that has their list, for errors.

    Returns:
        The hosts; none if all workers and servers are on this host.

    Raises:
        ConfigError: The workers of a host do not stand side by side, the two lists of workers have hosts in another
            order, or an address means another host on each.
    """
    if all(is_here(each.host) for each in (*workers, *heterogeneous, *servers)):
        return ()
    names = list(dict.fromkeys(each.host for each in workers))
    _require_order(option, workers, [each.host for each in workers], names)
    require_reachable_names(option, workers)
    require_reachable_names(heterogeneous_option, heterogeneous)
    require_reachable_names("--servers", servers)
    own_names = [_find_name(each, names) for each in heterogeneous]
    _require_order(heterogeneous_option, heterogeneous, own_names, names)
    for each in servers:
        _find_name(each, names)
    found = []
    for name in names:
        kinds = sum(each.host == name for each in workers), own_names.count(name)
        found.append(Host(address=name, workers=sum(kinds), heterogeneous=kinds[1]))
    return tuple(found)


def _find_name(endpoint: Endpoint, names: list[str]) -> str:
    """Return the name of an endpoint's host among the hosts of a run. A host that is not among them is added."""
    found = next((name for name in names if is_same_host(endpoint.host, name)), None)
    if found is None:
        names.append(endpoint.host)
    return endpoint.host if found is None else found


def _require_order(option: str, workers: Sequence[Endpoint], hosts: Sequence[str], names: Sequence[str]) -> None:
    """Raise `ConfigError` unless a list has the workers of each host side by side, in the order of the hosts.

    Args:
        option: The option that has the list.
        workers: The address of each worker.
        hosts: The name of the host of each.
        names: The hosts of the run.
    """
    if [host for host, _ in groupby(hosts)] == [name for name in names if name in hosts]:
        return
    order = sorted(range(len(workers)), key=lambda number: names.index(hosts[number]))
    raise ConfigError(
        expected=f"the workers of each host side by side in {option}, in the order of the hosts of the run, because "
        "ranks follow it",
        found=",".join(map(str, workers)),
        fix=f"reorder them: {option}={','.join(str(workers[number]) for number in order)}",
    )


def order_workers(
    hosts: Sequence[Host], workers: Sequence[Endpoint], heterogeneous: Sequence[Endpoint]
) -> tuple[Endpoint, ...]:
    """Return the addresses of all workers in the order of their ranks: on each host heterogeneous ones come last.

    Args:
        hosts: The hosts of the run; none if all workers are on this host.
        workers: The address of each worker that is not heterogeneous, in the order of hosts.
        heterogeneous: The address of each heterogeneous worker, in the order of hosts.
    """
    if not hosts:
        return (*workers, *heterogeneous)
    first, second, found = iter(workers), iter(heterogeneous), []
    for host in hosts:
        found += [next(first) for _ in range(host.workers - host.heterogeneous)]
        found += [Endpoint(host.address, next(second).port) for _ in range(host.heterogeneous)]
    return tuple(found)


def is_same_host(name: str, other: str) -> bool:
    """Return whether two names or addresses mean one host, as far as this host can tell."""
    if name == other or (is_here(name) and is_here(other)):
        return True
    return bool(addresses_of(name) & addresses_of(other))


def require_reachable_names(option: str, endpoints: Sequence[Endpoint]) -> None:
    """Raise `ConfigError` for an address that each host has for itself, as 127.0.0.1, in a run on several hosts."""
    own = next((each for each in endpoints if each.host == _LOCALHOST or is_loopback(each.host)), None)
    if own is not None:
        raise ConfigError(
            expected=f"addresses in {option} by which the hosts of the run reach each other",
            found=f"{own}, which every host has for itself",
            fix="give an address of that host in the network of the run",
        )


def require_server_hosts(servers: RequestedServers | None, cluster: Cluster | None) -> None:
    """Raise `ConfigError` for servers that no hosts of the run can have."""
    endpoints = [] if servers is None else list(map(parse_endpoint, servers.endpoints))
    if cluster is not None:
        require_reachable_names("--servers", endpoints)
        _require_secret_keys(servers, cluster)
        return
    others = sorted({each.host for each in endpoints if not is_here(each.host)})
    if others:
        raise ConfigError(
            expected="addresses of this host in --servers, because all workers of this run are here",
            found=f"{', '.join(others)}, which {'is' if len(others) == 1 else 'are'} not this host",
            fix="list the workers, too: with --workers A,A and --servers B,C the hosts B and C have servers alone",
        )


def _require_secret_keys(servers: RequestedServers | None, cluster: Cluster) -> None:
    if servers is not None and servers.encrypted and cluster.insecure:
        raise ConfigError(
            expected="a token that nobody else knows, from which the keys of --encrypt-servers follow",
            found="--insecure, with which those who read the network know the keys",
            fix="omit --insecure, or --encrypt-servers",
        )


def find_own_servers(servers: RequestedServers | None) -> tuple[int, ...]:
    """Return the indices of the servers whose given addresses are this host's."""
    endpoints = () if servers is None else servers.endpoints
    own = own_addresses()
    return tuple(index for index, text in enumerate(endpoints) if addresses_of(parse_endpoint(text).host) & own)


def divide_servers(count: int, host_count: int) -> tuple[int, ...]:
    """Return the index of the host of each of `count` servers without addresses.

    Neighbours share a host. The first hosts have one more if it is uneven.
    """
    size, more = divmod(count, host_count)
    return tuple(host for host in range(host_count) for _ in range(size + (host < more)))


def place_copies(hosts: Sequence[int], candidates: Sequence[int]) -> tuple[int, ...]:
    """Return the index of the host of each server's copy.

    The copies of a host's servers go to the hosts after it in turn, so that hosts have equally many. With one host they
    are there too.

    Args:
        hosts: The index of the host of each server.
        candidates: The hosts that may have copies, in their order, each once. They include `hosts`.
    """
    placed: list[int] = []
    for server, host in enumerate(hosts):
        others = [each for each in candidates if each > host] + [each for each in candidates if each < host]
        before = hosts[:server].count(host)
        placed.append(others[before % len(others)] if others else host)
    return tuple(placed)


def require_replicas(servers: RequestedServers) -> None:
    """Raise `ConfigError` for copies of servers that no run can have."""
    if servers.replicas not in (0, 1):
        raise ConfigError(
            expected="--copies 0 or 1: none, or one copy of each server",
            found=servers.replicas,
            fix="give --copies 1",
        )
    names = [parse_endpoint(each).host for each in servers.endpoints]
    if servers.replicas and names and all(is_same_host(name, names[0]) for name in names):
        raise ConfigError(
            expected="addresses of two hosts or more in --servers with --copies 1, which puts copies on another host",
            found=f"{', '.join(servers.endpoints)}, on one host",
            fix=f"add a server on another host; --servers {len(names)} puts copies on this host, too",
        )


def count_own_servers(servers: RequestedServers | None, cluster: Cluster | None) -> int:
    """Return how many servers will run on this host; at most so many if its index is not known yet."""
    if servers is None or cluster is None:
        return 0 if servers is None else servers.process_count
    if servers.endpoints:  # as many copies as first servers, because hosts share copies evenly
        return len(find_own_servers(servers)) * (1 + servers.replicas)
    hosts = divide_servers(servers.process_count, len(cluster.hosts))
    return hosts.count(0 if cluster.host_index == UNKNOWN_HOST else cluster.host_index)


def describe_servers(servers: RequestedServers | None) -> tuple[str, ...]:
    """Return what all hosts of a run must request alike, as texts to compare."""
    if servers is None:
        return ()
    requested = servers.endpoints or (f"{servers.count} servers",)
    settings = (f"mode {servers.mode}", f"staleness {servers.staleness}", f"{servers.geo_steps} geo steps")
    more = (*(["1 replica"] if servers.replicas else []), *(["encrypted"] if servers.encrypted else []))
    return (*requested, *settings, f"{servers.max_restarts} restarts", *more)

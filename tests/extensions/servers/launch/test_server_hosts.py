"""Which hosts of a run have which servers and workers, from the addresses that a user gives."""

import pytest

from rankless.config.hosts_and_addresses import Endpoint, Host, parse_endpoint
from rankless.config.run_config import UNKNOWN_HOST, Cluster
from rankless.errors import ConfigError
from rankless.extensions.servers.config import RequestedServers, format_server_address, parse_server_address
from rankless.extensions.servers.launch import server_hosts
from rankless.extensions.servers.launch.server_hosts import (
    count_own_servers,
    divide_servers,
    find_own_servers,
    find_worker_hosts,
    order_workers,
    place_copies,
    require_server_hosts,
)


@pytest.fixture(autouse=True)
def _this_host_is_a(monkeypatch: pytest.MonkeyPatch):
    """Give this host the addresses of `a`: 10.0.0.1 and loopback."""
    names = {"a": {"10.0.0.1"}, "b": {"10.0.0.2"}, "localhost": {"127.0.0.1"}}
    monkeypatch.setattr(server_hosts, "addresses_of", lambda name: frozenset(names.get(name, {name})))
    monkeypatch.setattr(server_hosts, "own_addresses", lambda: frozenset({"10.0.0.1", "127.0.0.1", "::1"}))
    monkeypatch.setattr(server_hosts, "is_here", lambda name: name in ("a", "10.0.0.1", "127.0.0.1", "localhost"))


def endpoints_of(text: str) -> list[Endpoint]:
    return [parse_endpoint(each) for each in text.split(",")]


def requested(text: str) -> RequestedServers:
    return RequestedServers(count=len(text.split(",")), endpoints=tuple(text.split(",")))


def cluster(index: int, count: int = 3) -> Cluster:
    return Cluster(hosts=tuple(Host(address=f"10.0.0.{n}", workers=1) for n in range(1, count + 1)), host_index=index)


@pytest.mark.parametrize(
    ("workers", "servers", "hosts"),
    [
        ("a,a,b,b", "a:6170,b:6171", [("a", 2), ("b", 2)]),
        ("a:6172,a:6173,10.0.0.2:6174", "10.0.0.2", [("a", 2), ("10.0.0.2", 1)]),
        ("b,a", "a", [("b", 1), ("a", 1)]),
        ("127.0.0.1,localhost,a", "127.0.0.1:6170", []),
        ("a", "a:6170,b:6170", [("a", 1), ("b", 0)]),
        ("b,b", "b:6170,a:6171,10.0.0.1:6172", [("b", 2), ("a", 0)]),
        ("a,a", "10.0.0.1,10.0.0.2,c,b,10.0.0.2", [("a", 2), ("10.0.0.2", 0), ("c", 0)]),
    ],
)
def test_workers_name_the_hosts_in_their_order(workers: str, servers: str, hosts: list[tuple[str, int]]):
    found = find_worker_hosts("--workers", endpoints_of(workers), endpoints_of(servers))
    assert [(each.address, each.workers) for each in found] == hosts


@pytest.mark.parametrize(
    ("workers", "heterogeneous", "servers", "hosts", "endpoints"),
    [
        ("a,b", "c:1,c", "d", [("a", 1, 0), ("b", 1, 0), ("c", 2, 2), ("d", 0, 0)], "a,b,c:1,c"),
        ("a,b:5", "10.0.0.1:7,10.0.0.2", "a", [("a", 2, 1), ("b", 2, 1)], "a,a:7,b:5,b"),
        ("b", "a,a,c", "c", [("b", 1, 0), ("a", 2, 2), ("c", 1, 1)], "b,a,a,c"),
        ("a", "localhost,127.0.0.1", "a", [], "a,localhost,127.0.0.1"),
    ],
)
def test_heterogeneous_workers_come_last_on_their_hosts(workers, heterogeneous, servers, hosts, endpoints: str):
    lists = endpoints_of(heterogeneous)
    found = find_worker_hosts("--workers", endpoints_of(workers), endpoints_of(servers), heterogeneous=lists)
    assert [(each.address, each.workers, each.heterogeneous) for each in found] == hosts
    assert ",".join(map(str, order_workers(found, endpoints_of(workers), lists))) == endpoints


@pytest.mark.parametrize(
    ("workers", "servers", "message"),
    [
        ("a,b,a", "a", "--workers=a,a,b"),
        ("127.0.0.1,b", "b", "127.0.0.1, which every host has for itself"),
        ("a,localhost:7,b", "b", "localhost:7, which every host has for itself"),
        ("b,b", "b:6170,localhost:6171", "localhost:6171, which every host has for itself"),
    ],
)
def test_lists_that_name_no_hosts_are_refused(workers: str, servers: str, message: str):
    with pytest.raises(ConfigError) as error:
        find_worker_hosts("--workers", endpoints_of(workers), endpoints_of(servers))
    assert message in str(error.value)


def test_servers_of_other_hosts_need_workers_there():
    with pytest.raises(ConfigError, match=r"10\.0\.0\.2, b, which are not this host"):
        require_server_hosts(requested("a:1,b:2,10.0.0.2:3"), None)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:6170, which every host has for itself"):
        require_server_hosts(requested("a,127.0.0.1:6170"), cluster(0))
    require_server_hosts(requested("a,b:2"), cluster(0))
    require_server_hosts(RequestedServers(count=2), None)


def test_a_number_of_servers_is_divided_evenly_in_the_order_of_hosts():
    assert divide_servers(5, 3) == (0, 0, 1, 1, 2)
    assert divide_servers(2, 3) == (0, 1)
    for count in range(1, 12):
        hosts = divide_servers(count, 4)
        assert (len(hosts), sorted(hosts)) == (count, list(hosts))
        sizes = [hosts.count(host) for host in range(4)]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("hosts", "candidates", "copies"),
    [
        ((0, 1), (0, 1), (1, 0)),
        ((0, 1, 2), (0, 1, 2), (1, 2, 0)),
        ((0, 0, 1, 1, 2, 2), (0, 1, 2), (1, 2, 2, 0, 0, 1)),
        ((2, 2, 1), (1, 2), (1, 1, 2)),
        ((0, 0), (0, 1), (1, 1)),  # a number of servers on hosts that have more than servers
        ((0, 0, 0), (0,), (0, 0, 0)),
    ],
)
def test_copies_are_on_another_host_and_divided_evenly(hosts, candidates, copies):
    assert place_copies(hosts, candidates) == copies


def test_copies_are_never_with_their_server_if_there_are_two_hosts():
    for count in range(2, 6):
        for servers in range(1, 11):
            hosts = divide_servers(servers, count)
            placed = place_copies(hosts, range(count))
            assert not [pair for pair in zip(hosts, placed, strict=True) if pair[0] == pair[1]]
            assert servers % count or len({placed.count(host) for host in range(count)}) == 1


def test_a_host_counts_its_own_servers():
    assert find_own_servers(requested("b,a:1,10.0.0.1:2,b:3")) == (1, 2)
    assert find_own_servers(None) == ()
    assert count_own_servers(None, cluster(0)) == 0
    assert count_own_servers(requested("a:1,b:2"), None) == 2
    assert count_own_servers(requested("b,a:1,10.0.0.1:2"), cluster(0)) == 2
    five = RequestedServers(count=5)
    assert [count_own_servers(five, cluster(index)) for index in (0, 1, 2, UNKNOWN_HOST)] == [2, 2, 1, 2]


@pytest.mark.parametrize("host", ["10.0.0.1", "fd77::1"])
def test_addresses_of_servers_can_be_read_again(host: str):
    address = format_server_address(host, 6170)
    assert address.startswith("tcp://")
    assert parse_server_address(address) == (host, 6170)

"""The addresses of parameter servers on two hosts: which they get, and which end the run before it starts."""

import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts import Hosts, two_hosts
from support.jobs import wait_until
from support.server_hosts import A, B, finish, run, start, wait_for_processes
from support.server_jobs import WAITING
from support.servers import SERVER

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("two"), sshd=()) as found:
        yield found


LISTEN = textwrap.dedent(
    """
    import socket, sys
    listening = socket.create_server((sys.argv[1], 6171))
    open("listens", "w").close()
    while True:
        listening.accept()[0].close()
    """
)


@pytest.mark.parametrize(("name", "host"), [("b", B), pytest.param("a", A, marks=pytest.mark.exhaustive)])
def test_a_port_in_use_ends_the_run_on_all_hosts(name: str, host: str, hosts: Hosts, tmp_path: Path):
    other = hosts.start(name, [sys.executable, "-c", LISTEN, host], cwd=tmp_path)
    wait_until(lambda: (tmp_path / "listens").exists())
    job = run(hosts, tmp_path, "open('started', 'w').close()", servers=(f"--servers={A}:6171,{B}:6171",) * 2)
    other.kill()
    other.communicate()
    assert job.codes == [2, 2], job.errors
    for text in job.errors:
        assert f"expected: {host}:6171 of --servers to be free" in text
        assert f"taken by process {other.pid}" in text
    assert not (tmp_path / "started").exists()


WRONG_ADDRESSES = [
    (
        (f"--servers={A},10.77.0.9:6171 --hosts={A}:1,{B}:1",) * 2,
        f"10.77.0.9:6171, which is an address of none of {A}, {B}",
    ),
    ((f"--servers={A},{B}:6171", f"--servers={A},{B}:6172"), f"the parameter servers: {B} has {A}, {B}:6172"),
    (
        (f"--servers={A}", "--servers=2"),
        f"the parameter servers: {B} has 2 servers, mode sync, staleness 4, 10 geo steps, 10 restarts, "
        f"{A} has {A}, mode",
    ),
]


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize(("servers", "message"), WRONG_ADDRESSES)
def test_addresses_that_hosts_cannot_share_are_refused(servers, message: str, hosts: Hosts, tmp_path: Path):
    workers = "-q" if "--hosts" in servers[0] else f"--workers={A},{B}"
    job = run(hosts, tmp_path, "open('started', 'w').close()", servers=servers, workers=workers)
    assert job.codes == [2, 2], job.errors
    for text in job.errors:
        assert message in text
    assert not (tmp_path / "log").exists()


@pytest.mark.exhaustive
def test_two_runs_at_once_do_not_share_addresses(hosts: Hosts, tmp_path: Path):
    waits = start(hosts, tmp_path, WAITING, servers=(f"--servers={A}:6171,{B}:6172",) * 2)
    wait_for_processes(waits, tmp_path)
    (tmp_path / "second").mkdir()
    second = run(hosts, tmp_path / "second", "pass", servers=[f"--servers={A},{B}:6172 --port=9955"] * 2)
    assert second.codes == [2, 2], second.errors
    assert f"expected: {B}:6172 of --servers to be free" in second.errors[0]
    assert run(hosts, tmp_path / "second", "pass", servers=[f"--servers={A},{B} --port=9955"] * 2).codes == [0, 0]
    for job in waits:
        job.send_signal(signal.SIGTERM)
    ended = finish(waits, tmp_path)
    assert ended.codes == [143, 143], ended.errors


@pytest.mark.exhaustive
def test_a_firewall_before_a_server_is_found_before_the_run_starts(tmp_path: Path):
    with two_hosts(tmp_path, sshd=()) as apart:
        apart.firewall("b", closed_port=6171)
        job = run(apart, tmp_path, "open('started', 'w').close()", servers=(f"--servers={A},{B}:6171",) * 2)
    assert job.codes == [2, 2], job.errors
    for text in job.errors:
        assert f"{A} → {B}:6171 (server 1): no answer, so a firewall drops packets" in text
    assert not (tmp_path / "started").exists()


@pytest.mark.exhaustive
def test_a_host_whose_name_is_a_loopback_address_there_serves_at_its_outward_one(tmp_path: Path):
    with two_hosts(tmp_path, sshd=()) as apart:
        apart.names("b", f"127.0.0.1 localhost\n127.0.1.1 b\n{A} a\n")
        job = run(apart, tmp_path, "print('done')", servers=("--servers=a,b",) * 2, workers="--workers=a,b")
    assert (job.codes, job.outputs) == ([0, 0], ["done\n", ""]), job.errors
    assert f"tcp://{B}:" in job.errors[0]


IPV6 = (
    SERVER.replace("socket.create_server((host, int(port)))", "six(host, port)")
    + """
def six(host, port):
    return socket.create_server((host.strip("[]"), int(port)), family=socket.AF_INET6)

answer()
"""
)


@pytest.mark.exhaustive
def test_servers_have_addresses_of_ipv6(tmp_path: Path):
    with two_hosts(tmp_path, sshd=()) as apart:
        for name, number in (("a", 1), ("b", 2)):
            apart.ip(name, "address", "add", f"fd77::{number}/64", "dev", "eth0", "nodad")
        servers, workers = "--servers=[fd77::1]:6170,fd77::2", "--workers=fd77::1,[fd77::2]:7000"
        job = run(apart, tmp_path, "print('done')", servers=(servers,) * 2, workers=workers, server=IPV6)
    assert (job.codes, job.outputs) == ([0, 0], ["done\n", ""]), job.errors
    assert "tcp://[fd77::1]:6170" in job.errors[0]

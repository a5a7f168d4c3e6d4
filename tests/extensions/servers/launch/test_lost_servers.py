"""Whether a run continues without a lost server or host, and what its records then say."""

from collections.abc import Iterator

import pytest

from rankless.config.run_config import AgreedJobConfig, AgreedProcesses
from rankless.extensions.servers.config import ServersConfig, is_server_lost
from rankless.extensions.servers.launch.role import LostServers
from rankless.launch.other_hosts_interface import Peers
from rankless.launch.supervisor.failure_attribution import attribute_failure
from rankless.records.events import NO_RANK, AnyRecord, HostLost, Notice, ProcessExited, ProcessLost

HOSTS = (1, 2, 2, 1)
"""Server 0 and its copy, server 2, are on the hosts 1 and 2; server 1 and its copy, server 3, on 2 and 1."""


def make_run(replicas: int = 1, hosts: tuple[int, ...] = HOSTS, workers: tuple[int, ...] = (2, 0, 0)) -> LostServers:
    addresses = tuple(f"tcp://10.0.0.{host}:{index + 1}" for index, host in enumerate(hosts))
    start = AgreedJobConfig(
        run_id="run",
        seed=0,
        workers=workers,
        backend="gloo",
        master_address="a",
        master_port=1,
        store_address="a",
        store_port=2,
        roles={"servers": AgreedProcesses(addresses=addresses, hosts=hosts, role="server")},
    )
    servers = ServersConfig(addresses=addresses, token="secret", replicas=replicas)
    return LostServers(servers, start, names=("a", "b", "c")[: len(workers)], peers=Peers())


@pytest.fixture
def run() -> Iterator[LostServers]:
    run = make_run()
    yield run
    run.close()


def host_lost(host: int) -> HostLost:
    return HostLost(rank=NO_RANK, time_ns=0, host="abc"[host], how="was lost: gone", host_index=host)


def exited(server: int, code: int = -9, **more) -> ProcessExited:
    return ProcessExited(rank=NO_RANK, time_ns=0, role="server", number=server, exit_code=code, **more)


def judge(run: LostServers, records: list[AnyRecord]) -> list[AnyRecord]:
    return list(run.cover_processes(run.cover_hosts(records)))


def lost_of(run: LostServers) -> list[int]:
    return [server for server in range(4) if is_server_lost(run.descriptor, server)]


def texts_of(records: list[AnyRecord]) -> list[str]:
    return [record.text for record in records if isinstance(record, Notice)]


def test_a_lost_host_of_servers_with_copies_is_no_failure(run: LostServers):
    records = judge(run, [host_lost(1)])
    assert attribute_failure(records) is None
    assert [record.number for record in records if isinstance(record, ProcessLost)] == [0, 3]
    assert texts_of(records) == [
        "host b was lost: gone; the run continues with server 2 in place of server 0, server 1 without a copy"
    ]
    assert lost_of(run) == [0, 3]


def test_the_second_host_of_the_same_tables_is_the_root_cause(run: LostServers):
    verdict = attribute_failure([*judge(run, [host_lost(1)]), *judge(run, [host_lost(2)])])
    assert verdict is not None
    assert verdict.headline == "host c was lost: gone; servers 1 and 3, which had the same tables, are lost"
    assert verdict.root_cause_host == "c"


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (exited(3), "server 3 on b was killed by SIGKILL; the run continues with server 1 without a copy"),
        (
            exited(0, 3, note=", in vain"),
            "server 0 on b ended with exit code 3, in vain; the run continues with server 2 in place of server 0",
        ),
        (
            exited(1, 0),
            "server 1 on c ended with exit code 0; the run continues with server 3 in place of server 1",
        ),
    ],
)
def test_a_server_that_is_not_started_again_is_no_failure(record: ProcessExited, text: str, run: LostServers):
    records = judge(run, [record])
    assert attribute_failure(records) is None
    assert texts_of(records) == [text]
    assert lost_of(run) == [record.number]


def test_a_server_that_starts_again_is_not_lost(run: LostServers):
    record = exited(2, is_restarted=True)
    assert judge(run, [record]) == [record]
    assert lost_of(run) == []


def test_a_server_that_is_lost_after_its_copy_is_the_root_cause(run: LostServers):
    verdict = attribute_failure([*judge(run, [exited(2)]), *judge(run, [exited(0)])])
    assert verdict is not None
    assert verdict.root_cause_number == 0
    assert verdict.headline.endswith("(SIGKILL); server 2, which had the same tables, was lost before")
    assert lost_of(run) == [2]


def test_a_host_whose_servers_are_lost_already_can_be_lost_too(run: LostServers):
    records = [each for record in (exited(0), exited(3), host_lost(1)) for each in judge(run, [record])]
    assert attribute_failure(records) is None
    assert texts_of(records)[-1] == "host b was lost: gone; the run continues"


@pytest.mark.parametrize(
    ("hosts", "workers"),
    [((1, 1, 1, 1), (2, 0)), ((1, 2, 1, 2), (2, 0, 0))],
    ids=["one host", "copies on the same host"],
)
def test_other_lost_hosts_are_root_causes(hosts: tuple[int, ...], workers: tuple[int, ...]):
    run = make_run(hosts=hosts, workers=workers)
    verdict = attribute_failure(judge(run, [host_lost(1)]))
    assert verdict is not None
    assert verdict.headline.startswith("host b was lost: gone")
    assert lost_of(run) == []
    run.close()


def test_of_a_host_with_workers_the_servers_are_covered():
    run = make_run(hosts=HOSTS, workers=(2, 1, 0))
    record, *more = judge(run, [host_lost(1)])
    assert isinstance(record, HostLost)
    assert (record.are_processes_covered, record.is_covered) == (True, False)
    assert texts_of(more)[0].startswith("host b was lost: gone; its tables continue with server 2 in place of")
    assert lost_of(run) == [0, 3]
    run.close()


def test_a_host_of_workers_alone_has_no_tables_that_go_on():
    run = make_run(hosts=HOSTS, workers=(2, 0, 0, 1))
    (record,) = judge(run, [HostLost(rank=2, time_ns=0, host="d", how="was lost: gone", host_index=3)])
    assert isinstance(record, HostLost)
    assert (record.are_processes_covered, record.is_covered) == (True, False)
    run.close()


def test_without_copies_records_stay_as_they_are():
    run = make_run(replicas=0)
    records = [host_lost(1), exited(0)]
    assert judge(run, records) == records
    assert run.descriptor is None
    assert run.warning == ""


def test_a_warning_says_that_copies_on_one_host_cover_no_lost_host(run: LostServers):
    one = make_run(hosts=(0, 0), workers=(2,))
    assert "and not a lost host" in one.warning
    assert run.warning == ""
    one.close()

"""A job on two hosts that stands still: host 0 asks all for their ranks, and names the one that does not come."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts import Hosts, two_hosts

pytestmark = pytest.mark.slow

SCRIPT = """
import sys, torch, torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def stuck():
    while True: pass  # there

for step in range(9):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if step == 6 and dist.get_rank() == int(sys.argv[1]):
        stuck()
    dist.all_reduce(torch.ones(3))  # here
"""


def line_of(mark: str) -> int:
    return next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if f"# {mark}" in line)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("two"), sshd=()) as found:
        yield found


def report_of(hosts: Hosts, folder: Path, *, workers: int, culprit: int) -> str:
    """What host 0 says of a job with one rank that computes for ever."""
    (folder / "script.py").write_text(SCRIPT)
    listed = ",".join(f"{address}:{workers}" for address in hosts.addresses)
    options = ["--hosts", listed, "--no-ssh", "--insecure", "--hang-timeout", "5"]
    line = [sys.executable, "-m", "rankless", "run", *options, "script.py", str(culprit)]
    jobs = [hosts.start(name, line, cwd=folder) for name in ("a", "b")]
    reports = [job.communicate(timeout=60)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [1, 1], reports
    return reports[0]


@pytest.mark.parametrize(("culprit", "host"), [(1, "b"), pytest.param(0, "a", marks=pytest.mark.exhaustive)])
def test_a_rank_that_computes_alone_on_its_host_is_named_with_its_stack(
    culprit: int, host: str, hosts: Hosts, tmp_path: Path
):
    report = report_of(hosts, tmp_path, workers=1, culprit=culprit)
    where = f"on {hosts.addresses['ab'.index(host)]}"
    before, _, said = report.rpartition("no progress for")
    assert f"rank {culprit} {where} did not come: it is in stuck() at script.py:{line_of('there')}" in said
    assert f'File "script.py", line {line_of("there")}, in stuck' in said
    assert f"rank {1 - culprit} waits in all_reduce at script.py:{line_of('here')}" in said
    # On a busy machine the start may have been slow, and be spoken of, too.
    assert before.count("no progress for") == before.count("the job goes on"), report


def test_where_all_ranks_of_all_hosts_are_is_in_host_0s_file(hosts: Hosts, tmp_path: Path):
    report = report_of(hosts, tmp_path, workers=2, culprit=3)
    assert f"rank 3 on {hosts.addresses[1]} did not come: it is in stuck()" in report
    assert f"ranks 0-2 wait in all_reduce at script.py:{line_of('here')}" in report
    text = (tmp_path / "log" / "latest" / "stacks.txt").read_text()
    assert [f"-- rank {rank}, " in text for rank in range(4)] == [True] * 4
    assert f"line {line_of('there')}, in stuck" in text

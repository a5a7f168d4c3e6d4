"""A hung job on two hosts: host 0 collects the status of all ranks and names the missing one."""

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


def line_number(mark: str) -> int:
    return next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if f"# {mark}" in line)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("two"), sshd=()) as found:
        yield found


def run_hung_job(hosts: Hosts, folder: Path, *, workers: int, missing_rank: int) -> str:
    """Return what host 0 prints about a job in which one rank computes forever."""
    (folder / "script.py").write_text(SCRIPT)
    listed = ",".join(f"{address}:{workers}" for address in hosts.addresses)
    options = ["--hosts", listed, "--no-ssh", "--insecure", "--hang-timeout", "5"]
    line = [sys.executable, "-m", "rankless", "run", *options, "script.py", str(missing_rank)]
    jobs = [hosts.start(name, line, cwd=folder) for name in ("a", "b")]
    reports = [job.communicate(timeout=60)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [1, 1], reports
    return reports[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("missing_rank", "host"), [(1, "b"), pytest.param(0, "a", marks=pytest.mark.exhaustive)])
def test_a_rank_that_computes_forever_is_named_with_its_stack(
    missing_rank: int, host: str, hosts: Hosts, tmp_path: Path
):
    report = run_hung_job(hosts, tmp_path, workers=1, missing_rank=missing_rank)
    where = f"on {hosts.addresses['ab'.index(host)]}"
    before, _, last = report.rpartition("no progress for")
    assert f"rank {missing_rank} {where} did not arrive: it is in stuck() at script.py:{line_number('there')}" in last
    assert f'File "script.py", line {line_number("there")}, in stuck' in last
    assert f"rank {1 - missing_rank} waits in all_reduce at script.py:{line_number('here')}" in last
    # On a busy machine the watchdog may report a slow start too.
    assert before.count("no progress for") == before.count("the job continues"), report


@pytest.mark.exhaustive
def test_host_0s_file_has_the_stacks_of_all_hosts(hosts: Hosts, tmp_path: Path):
    report = run_hung_job(hosts, tmp_path, workers=2, missing_rank=3)
    assert f"rank 3 on {hosts.addresses[1]} did not arrive: it is in stuck()" in report
    assert f"ranks 0-2 wait in all_reduce at script.py:{line_number('here')}" in report
    text = (tmp_path / "log" / "latest" / "stacks.txt").read_text()
    assert [f"-- rank {rank}, " in text for rank in range(4)] == [True] * 4
    assert f"line {line_number('there')}, in stuck" in text

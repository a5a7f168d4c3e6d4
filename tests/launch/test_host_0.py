"""Host 0: what is reported about its agent, and the address at which it listens for the other hosts."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts import Hosts, two_hosts
from support.jobs import read_process_ids, wait_until

from rankless.config import hosts_and_addresses as host_names
from rankless.errors import ConfigError

pytestmark = pytest.mark.slow

LOOP = """
import os, time
import torch, torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group()
with open(f"rank{rank}.pid", "w") as file:
    print(os.getpid(), file=file)
while True:
    dist.all_reduce(torch.ones(4))
    time.sleep(0.01)
"""
JOIN = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("ranks", int(total), os.environ["MASTER_ADDR"])
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("two"), sshd=()) as found:
        yield found


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "rankless", *words]


@pytest.mark.exhaustive
def test_an_agent_of_host_0_that_was_stopped_is_named_on_both_hosts(hosts: Hosts, tmp_path: Path):
    listed = ",".join(f"{address}:1" for address in hosts.addresses)
    (tmp_path / "script.py").write_text(LOOP)
    line = command("run", "--hosts", listed, "--no-ssh", "--insecure", "--no-progress", "script.py")
    agents = [hosts.start(name, line, cwd=tmp_path) for name in ("a", "b")]
    wait_until(lambda: len(read_process_ids(tmp_path)) == 2)
    os.kill(agents[0].pid, signal.SIGSTOP)
    reports = ["", agents[1].communicate(timeout=60)[1]]
    os.kill(agents[0].pid, signal.SIGCONT)
    reports[0] = agents[0].communicate(timeout=60)[1]
    assert [agent.returncode for agent in agents] == [1, 1], reports
    addresses = hosts.addresses
    assert f"host 0, {addresses[0]}, was lost: no heartbeat for" in reports[1]
    why = f"{addresses[1]} had no heartbeat for . s from its agent, and ended its workers. This agent did not run for"
    assert re.search(f"host {addresses[0]} was lost: {why}", reports[0]), reports[0]
    first = next(text for text in reports[0].splitlines() if "Traceback" in text or "was lost" in text)
    assert "was lost" in first, reports[0]


LAUNCHES = {
    "torchrun": ("torchrun", "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "a:29433", "--insecure"),
    "fleetrun": ("fleetrun", "--insecure", "--nnodes=2", "--master=a:29434"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("launcher", LAUNCHES)
def test_host_0_listens_where_others_reach_it_although_its_name_is_a_loopback_address(
    launcher: str, hosts: Hosts, tmp_path: Path
):
    hosts.names("a", "127.0.0.1 localhost\n127.0.1.1 a\n10.77.0.2 b\n")
    (tmp_path / "script.py").write_text(JOIN)
    jobs = [hosts.start(name, command(*LAUNCHES[launcher], "script.py"), cwd=tmp_path) for name in ("a", "b")]
    results = [job.communicate(timeout=100) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], results
    assert f"the name a is a loopback address here: host 0 listens on {hosts.addresses[0]}" in results[0][1]
    logs = "".join(path.read_text() for path in tmp_path.rglob("*.log"))
    assert f"ranks 2 {hosts.addresses[0]}" in logs + results[0][0]


def test_a_listed_name_that_does_not_resolve_is_named():
    listed = (
        host_names.Host(address="no.such.name.invalid", workers=1),
        host_names.Host(address="203.0.113.7", workers=1),
    )
    with pytest.raises(ConfigError) as refused:
        host_names.own_host_index(listed)
    assert str(refused.value.found).endswith("; no.such.name.invalid does not resolve here")
    assert refused.value.fix.startswith("correct no.such.name.invalid, or add it to /etc/hosts; ")

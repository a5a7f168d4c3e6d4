"""Ranks on two hosts (network namespaces) reduce within the hosts first, so that less data passes between them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hosts import Hosts, two_hosts

pytestmark = pytest.mark.slow
LARGE_BYTES = 3 * 4 * (4 << 20)

SCRIPT = """
import json, sys
from pathlib import Path
import torch
import horovod.torch as hvd


def sent_bytes():
    lines = [line.split() for line in Path("/proc/net/dev").read_text().splitlines() if "eth0" in line]
    return int(lines[0][9])


hvd.init()
wrong = []
near = {torch.float64: 1e-12, torch.bfloat16: 0.1, torch.int32: 0}
for dtype in near:
    for count in (40_003, 1_100_003):  # one piece of shared memory, and several with a rest
        rows = torch.linspace(-9, 20, hvd.size() * count, dtype=torch.float64).to(dtype).reshape(-1, count).double()
        reduced = {hvd.Sum: rows.sum(0), hvd.Average: rows.mean(0), hvd.Min: rows.amin(0), hvd.Max: rows.amax(0)}
        for op, wanted in reduced.items() if count < 10**6 else [(hvd.Sum, reduced[hvd.Sum])]:
            found = hvd.allreduce(rows[hvd.rank()].to(dtype), op=op, name=f"{dtype}.{count}.{op}").double()
            wanted = wanted if dtype.is_floating_point else wanted.trunc()
            bound = 0 if op in (hvd.Min, hvd.Max) else near[dtype] * wanted.abs().clamp(min=1)
            if ((found - wanted).abs() > bound).any():
                wrong.append(f"{dtype} {count} {op}: {(found - wanted).abs().max()}")
scaled = hvd.allreduce(torch.full((100_000,), 2.0), prescale_factor=3.0, postscale_factor=0.5, op=hvd.Sum)
if not torch.equal(scaled, torch.full((100_000,), 2.0 * 3 * 0.5 * hvd.size())):
    wrong.append("factors")
rows = hvd.reducescatter(torch.arange(100_001.0), op=hvd.Sum)
hvd.barrier()
before = sent_bytes()
for step in range(3):
    hvd.allreduce(torch.ones(4 << 20), name="large")
hvd.barrier()
found = {"wrong": wrong, "rows": len(rows), "sent": sent_bytes() - before}
Path(f"rank{hvd.rank()}.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    own_memory = dict.fromkeys("ab", "mount -t tmpfs none /dev/shm")
    with two_hosts(tmp_path_factory.mktemp("hosts"), before=own_memory) as found:
        yield found


def results(hosts: Hosts, folder: Path, listed: str, *words: str) -> list[dict[str, Any]]:
    """What each rank has written, of a job on both hosts."""
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    size = sum(int(each.partition(":")[2]) for each in listed.split(","))
    command = ["-m", "rankless", "horovodrun", "-np", str(size), "-H", listed, *words, sys.executable, "script.py"]
    done: subprocess.CompletedProcess[str] = hosts.run("a", [sys.executable, *command], cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(size)]


@pytest.mark.exhaustive
def test_ranks_of_two_hosts_reduce_within_their_hosts_first(hosts: Hosts, tmp_path: Path):
    by_hosts = results(hosts, tmp_path / "by_hosts", "a:2,b:2")
    assert [found["wrong"] for found in by_hosts] == [[]] * 4
    assert [found["rows"] for found in by_hosts] == [25_001, 25_000, 25_000, 25_000]
    # A ring of two hosts sends 2 * 1/2 of the values over each link, one of four ranks 2 * 3/4.
    assert 1 <= by_hosts[0]["sent"] / LARGE_BYTES < 1.25


@pytest.mark.exhaustive
def test_all_ranks_form_one_ring_if_it_is_switched_off(hosts: Hosts, tmp_path: Path):
    flat = results(hosts, tmp_path / "flat", "a:2,b:2", "--no-hierarchical-allreduce")
    assert [found["wrong"] for found in flat] == [[]] * 4
    assert 1.5 <= flat[0]["sent"] / LARGE_BYTES < 1.75


@pytest.mark.exhaustive
def test_hosts_may_have_different_numbers_of_ranks(hosts: Hosts, tmp_path: Path):
    found = results(hosts, tmp_path / "uneven", "a:2,b:1", "--hierarchical-allreduce")
    assert [each["wrong"] for each in found] == [[]] * 3

"""Runs on two hosts (network namespaces) of two workers have a hierarchical default group, and end as others do."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts import Hosts, two_hosts
from support.jobs import wait_until

pytestmark = pytest.mark.slow

TRAIN = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

world = int(os.environ.get("WORLD_SIZE", "1"))
if world > 1:
    dist.init_process_group("gloo")
rank = dist.get_rank() if world > 1 else 0
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.ReLU(), torch.nn.Linear(300, 1)).double()
trained = DistributedDataParallel(model) if world > 1 else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
generator = torch.Generator().manual_seed(1)
for _ in range(5):
    inputs = torch.randn(16, 20, generator=generator, dtype=torch.float64)
    trained(inputs[rank::world]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save([parameter.detach() for parameter in model.parameters()], f"parameters {world} {rank}")
if world > 1:
    pair = dist.new_group([0, 1])
    across = dist.new_group([0, 2])
    if rank == 0:
        print(dist.get_backend(), *[type(group).__name__ for group in (dist.group.WORLD, pair)], flush=True)
        print(dist.get_backend(across), flush=True)
    dist.monitored_barrier()
    dist.destroy_process_group()
"""
FAULTY = """
import os, time, torch, torch.distributed as dist
dist.init_process_group()
rank = dist.get_rank()
assert dist.get_backend() == "hierarchical"
for number in range(1_000_000):
    dist.all_reduce(torch.ones(200_000))
    if number == 20:
        with open(f"rank{rank}.pid", "w") as file:
            print(os.getpid(), file=file)
"""
JOB = """
import sys, torch, rankless

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
layers = [torch.nn.Linear(20, 300), torch.nn.ReLU(), torch.nn.Linear(300, 100)]
layers += [torch.nn.Linear(100, 9), torch.nn.Linear(9, 1)]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

@rankless.job(model=model, optimizer=optimizer, zero=sys.argv[1] if len(sys.argv) > 1 else None)
def train(inputs):
    return model(inputs).square().mean()

generator = torch.Generator().manual_seed(1)
for _ in range(5):
    loss = train(torch.randn(16, 20, generator=generator))
total = sum(float(parameter.abs().sum()) for parameter in model.parameters())
print(f"{float(loss):.12f} {total:.9f}", flush=True)
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("two")) as found:
        yield found


def command(hosts: Hosts, *words: str) -> list[str]:
    listed = ",".join(f"{address}:2" for address in hosts.addresses)
    return [sys.executable, "-m", "rankless", "run", "--hosts", listed, "--devices", "cpu", *words]


@pytest.mark.exhaustive
def test_a_foreign_script_trains_hierarchically_as_on_one_device(hosts: Hosts, tmp_path: Path):
    (tmp_path / "train.py").write_text(TRAIN)
    done = hosts.run("a", command(hosts, "train.py"), cwd=tmp_path, env={"OMP_NUM_THREADS": "1"}, seconds=100)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = done.stdout.splitlines()[-2:]
    assert shown == ["hierarchical HierarchicalProcessGroup SharedMemoryProcessGroup", "hierarchical"], done.stdout
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, check=True, timeout=60)
    code = """
import torch
plain = torch.load("parameters 1 0")
ranks = [torch.load(f"parameters 4 {rank}") for rank in range(4)]
assert all(torch.equal(one, other) for rank in ranks for one, other in zip(rank, ranks[0]))
assert all(torch.allclose(one, other, rtol=1e-12, atol=1e-14) for one, other in zip(plain, ranks[0]))
"""
    compared = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert compared.returncode == 0, compared.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "arguments",
    [pytest.param([], id="whole", marks=pytest.mark.exhaustive), pytest.param(["parameters"], id="divided")],
)
def test_a_job_trains_hierarchically_as_on_one_device(hosts: Hosts, arguments: list[str], tmp_path: Path):
    """Its gradients are in buckets for which one host would share memory."""
    (tmp_path / "job.py").write_text(JOB)
    done = hosts.run("a", command(hosts, "-q", "job.py", *arguments), cwd=tmp_path, seconds=100)
    assert done.returncode == 0, done.stdout + done.stderr
    plain = subprocess.run([sys.executable, "job.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == plain.stdout.splitlines()[-1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", ["data=2,pipeline=2", "pipeline=4"])
def test_a_pipeline_trains_across_hosts_as_on_one_device(hosts: Hosts, mesh: str, tmp_path: Path):
    (tmp_path / "job.py").write_text(JOB)
    done = hosts.run("a", command(hosts, "-q", "--mesh", mesh, "job.py"), cwd=tmp_path, seconds=100)
    assert done.returncode == 0, done.stdout + done.stderr
    plain = subprocess.run([sys.executable, "job.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == plain.stdout.splitlines()[-1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [["--backend", "gloo"], []], ids=["option", "variable"])
def test_a_user_can_keep_gloo_on_several_hosts(hosts: Hosts, options: list[str], tmp_path: Path):
    (tmp_path / "names.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "values = torch.ones(3)\n"
        "dist.all_reduce(values)\n"
        "if dist.get_rank() == 0:\n"
        "    print(dist.get_backend(), values.tolist(), flush=True)\n"
    )
    variables = {} if options else {"RANKLESS_BACKEND": "gloo"}
    done = hosts.run("a", command(hosts, *options, "names.py"), cwd=tmp_path, env=variables, seconds=100)
    assert done.stdout.splitlines()[-1:] == ["gloo [4.0, 4.0, 4.0]"], done.stdout + done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_killed_worker_ends_the_run_and_is_named(hosts: Hosts, rank: int, tmp_path: Path):
    (tmp_path / "faulty.py").write_text(FAULTY)
    process = hosts.start("a", command(hosts, "faulty.py"), cwd=tmp_path)
    files = [tmp_path / f"rank{each}.pid" for each in range(4)]
    wait_until(lambda: all(file.exists() and file.read_text().endswith("\n") for file in files), seconds=60)
    start = time.monotonic()
    os.kill(int(files[rank].read_text()), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 137, errors
    named = f"rank {rank} on {hosts.addresses[rank // 2]} was killed by signal 9 (SIGKILL)"
    assert named in errors, errors
    assert time.monotonic() - start < 20

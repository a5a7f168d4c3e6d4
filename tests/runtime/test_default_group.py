"""Runs on the CPU of one host have their default process group in shared memory, unless the user says otherwise."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import job_environment
from support.warm_runs import run_script

pytestmark = pytest.mark.slow

NAMES = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group({arguments})
values = torch.ones(3)
dist.all_reduce(values)
dist.monitored_barrier()
if dist.get_rank() == 0:
    print(dist.get_backend(), values.tolist())
dist.destroy_process_group()
"""
SHARED = "shared_memory [2.0, 2.0, 2.0]\n"
GLOO = "gloo [2.0, 2.0, 2.0]\n"


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize(
    "arguments",
    [
        "'gloo'",
        "",
        "'cpu:gloo'",
        "backend='gloo', init_method='env://', rank=int(os.environ['RANK']), world_size=2",
        "'gloo', init_method='file://' + os.path.abspath('store'), rank=int(os.environ['RANK']), world_size=2",
        "'gloo', store=dist.FileStore('store', 2), rank=int(os.environ['RANK']), world_size=2",
    ],
)
def test_a_script_that_makes_a_gloo_group_gets_one_in_shared_memory(arguments: str, tmp_path: Path):
    done = run_script(NAMES.format(arguments=arguments), "-n", "2", folder=tmp_path)
    assert done.stdout == SHARED, done.stdout + done.stderr


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize(
    ("options", "environment"),
    [
        (["--backend", "gloo"], {}),
        ([], {"RANKLESS_BACKEND": "gloo"}),
        ([], {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}),
    ],
    ids=["option", "variable", "debugging"],
)
def test_a_user_can_keep_gloo(options: list[str], environment: dict[str, str], tmp_path: Path):
    done = run_script(NAMES.format(arguments="'gloo'"), "-n", "2", *options, folder=tmp_path, **environment)
    assert done.stdout == GLOO, done.stdout + done.stderr


@pytest.mark.exhaustive
def test_checkpoints_of_torch_find_the_groups_devices(tmp_path: Path):
    """`set_model_state_dict` broadcasts to a device of the group, and `async_save` asks for one on the CPU."""
    script = """
import torch, torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
assert dist.get_backend() == "shared_memory"
model, source = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
state = source.state_dict() if dist.get_rank() == 0 else {}
set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
saved = {"model": model.state_dict()}
checkpoint.async_save(saved, checkpoint_id="saved").result()
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
checkpoint.load(saved, checkpoint_id="saved")
whole = [parameter.full_tensor() for parameter in model.parameters()]
if dist.get_rank() == 0:
    print(all(map(torch.equal, whole, source.parameters())))
dist.destroy_process_group()
"""
    done = run_script(script, "-n", "2", folder=tmp_path)
    assert done.stdout == "True\n", done.stdout + done.stderr


def test_a_group_of_a_part_of_the_workers_stays_with_gloo(tmp_path: Path):
    script = """
import os, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
if rank < 2:
    dist.init_process_group("gloo", store=dist.FileStore("store", 2), rank=rank, world_size=2)
    values = torch.ones(3)
    dist.all_reduce(values)
    if rank == 0:
        print(dist.get_backend(), values.tolist())
"""
    done = run_script(script, "-n", "3", folder=tmp_path)
    assert done.stdout == GLOO, done.stdout + done.stderr


JOINS = """
import rankless, torch
import torch.distributed as dist
rankless.init()
values = torch.ones(3)
rankless.collectives.all_reduce(values)
if rankless.rank() == 0:
    print(dist.get_backend(), values.tolist())
"""


def test_a_script_of_rankless_joins_in_shared_memory(tmp_path: Path):
    assert run_script(JOINS, "-n", "2", folder=tmp_path).stdout == SHARED
    assert run_script(JOINS, "-n", "2", "--backend", "gloo", folder=tmp_path).stdout == GLOO


NO_MEMORY = """
import os, resource
if os.environ["RANK"] == "0":
    # No file, anonymous or not, may grow beyond this.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
"""


@pytest.mark.parametrize("script", [NAMES.format(arguments="'gloo'"), JOINS], ids=["foreign", "rankless"])
def test_without_memory_the_run_uses_gloo_and_says_so_once(script: str, tmp_path: Path):
    done = run_script(NO_MEMORY + script, "-n", "2", folder=tmp_path)
    assert GLOO in done.stdout, done.stdout + done.stderr
    text = done.stdout + done.stderr
    assert text.count("collectives use Gloo instead of shared memory: there is no memory that all ranks can map") == 1


DESCENDANTS = """
import torch, torch.distributed as dist, torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
pair = dist.new_group([0, 1])
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
names = [dist.get_backend(pair) if rank < 2 else "shared_memory"]
names += [type(mesh.get_group(axis)).__name__ for axis in ("replica", "shard")]
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()
inputs = torch.randn(16, 8, dtype=torch.float64)

def train(model, inputs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

import copy
expected, replicated, sharded = (copy.deepcopy(plain) for _ in range(3))
train(expected, inputs)
train(DistributedDataParallel(replicated), inputs[rank::4])
fully_shard(sharded, mesh=mesh)
train(sharded, inputs[rank::4])
for wanted, ddp, fsdp in zip(expected.parameters(), replicated.parameters(), sharded.parameters()):
    assert torch.allclose(wanted, ddp, rtol=1e-12, atol=1e-14)
    assert torch.allclose(wanted, fsdp.full_tensor(), rtol=1e-12, atol=1e-14)
if rank == 0:
    print(names)
dist.destroy_process_group()
"""


def test_new_groups_meshes_ddp_and_fsdp_follow_the_default_group(tmp_path: Path):
    done = run_script(DESCENDANTS, "-n", "4", folder=tmp_path)
    assert done.stdout == "['shared_memory', 'SharedMemoryProcessGroup', 'SharedMemoryProcessGroup']\n", done.stderr


AGAIN = """
import torch, torch.distributed as dist
for number in range(3):
    dist.init_process_group("gloo")
    values = torch.full((5,), float(number))
    dist.all_reduce(values)
    if dist.get_rank() == 0:
        print(dist.get_backend(), float(values[0]))
    dist.barrier()
    dist.destroy_process_group()
"""


def test_a_script_may_destroy_its_group_and_make_it_again(tmp_path: Path):
    done = run_script(AGAIN, "-n", "2", folder=tmp_path)
    assert done.stdout == "shared_memory 0.0\nshared_memory 2.0\nshared_memory 4.0\n", done.stdout + done.stderr


LOADER = """
import torch, torch.distributed as dist
from torch.utils.data import DataLoader
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
total = torch.zeros(())
for batch in DataLoader(torch.arange(40.0), batch_size=4, num_workers=2):
    value = batch.sum()
    dist.all_reduce(value)
    total += value
if dist.get_rank() == 0:
    print(float(total))
"""


def test_reader_processes_that_are_forked_leave_the_group_alone(tmp_path: Path):
    done = run_script(LOADER, "-n", "2", folder=tmp_path)
    assert done.stdout == f"{2 * sum(range(40)):.1f}\n", done.stdout + done.stderr


SPAWNED = """
import rankless

def work(rank, joins_with_torch):
    import torch, torch.distributed as dist
    if joins_with_torch:
        dist.init_process_group("gloo")
    else:
        rankless.init()
    values = torch.ones(3)
    dist.all_reduce(values)
    return f"{dist.get_backend()} {values.tolist()}"

for joins_with_torch in (True, False):
    print(*rankless.spawn(work, (joins_with_torch,), nprocs=2))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("environment", "expected"), [({}, SHARED), ({"RANKLESS_BACKEND": "gloo"}, GLOO)])
def test_spawned_functions_join_in_shared_memory(environment: dict[str, str], expected: str, tmp_path: Path):
    (tmp_path / "script.py").write_text(SPAWNED)
    command, changed = [sys.executable, "script.py"], job_environment(environment)
    done = subprocess.run(command, cwd=tmp_path, env=changed, capture_output=True, text=True, timeout=120)
    assert done.stdout == 2 * f"{expected.strip()} {expected}", done.stdout + done.stderr


@pytest.mark.exhaustive
def test_processes_of_torchrun_join_in_shared_memory(tmp_path: Path):
    (tmp_path / "script.py").write_text(JOINS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=job_environment({}), capture_output=True, text=True, timeout=120)
    assert SHARED in done.stdout, done.stdout + done.stderr

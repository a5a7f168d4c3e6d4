"""Commands and scripts on a GPU: checkpoints, host memory, foreign scripts, plans, the doctor, killed workers."""

import json
import re

import pytest
from support.model_trainings import SCRIPTS
from support.warm_runs import rankless, run_script

TRAINING = """
import sys
import torch, torch.nn.functional as F
import rankless

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = torch.nn.Sequential(torch.nn.Linear(16, 30), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(30, 4))
model.to({device})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

@rankless.job(model=model, optimizer=optimizer{options})
def train(inputs, labels):
    return F.cross_entropy(model(inputs), labels)

data = torch.utils.data.TensorDataset(torch.randn(40, 16), torch.randint(0, 4, (40,)))
loader = rankless.loader(data, batch_size=16, shuffle=True{loader})
{before}
for epoch in range({epochs}):
    for inputs, labels in loader:
        loss = train(inputs, labels)
{after}
sums = [float(parameter.detach().sum()) for parameter in model.parameters()]
print("RESULT", f"{{float(loss):.13f}}", *(f"{{number:.13f}}" for number in sums))
"""
SAVE = 'rankless.save("saved", model=model, optimizer=optimizer, loader=loader, layout="sharded")'
LOAD = 'rankless.load("saved", model=model, optimizer=optimizer, loader=loader)'


def train(folder, *options, device='"cuda"', epochs=1, before="", after="", job="", loader=""):
    """Return the loss and the sums of parameters that a training prints."""
    text = TRAINING.format(device=device, epochs=epochs, before=before, after=after, options=job, loader=loader)
    done = run_script(text, *options, "--seed", "3", "--no-progress", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(word) for word in re.search("RESULT (.*)", done.stdout).group(1).split()]


def require_close(found, wanted):
    assert found == pytest.approx(wanted, rel=1e-9, abs=1e-11)


@pytest.mark.parametrize("zero", ["", ', zero="optimizer"', ', zero="parameters"'])
def test_a_checkpoint_of_gpus_continues_on_another_number_of_workers(tmp_path, zero):
    wanted = train(tmp_path, "-n", "1", epochs=2)
    train(tmp_path, "-n", "2", job=zero, after=SAVE)
    require_close(train(tmp_path, "-n", "3", before=LOAD), wanted)
    require_close(train(tmp_path, "-n", "1", job=zero, before=LOAD), wanted)


def test_a_checkpoint_of_a_gpu_loads_on_the_cpu_and_back(tmp_path):
    without_dropout = "model[2].p = 0.0"  # a GPU and the CPU draw other numbers
    wanted = train(tmp_path, "-n", "1", epochs=2, before=without_dropout)
    train(tmp_path, "-n", "2", before=without_dropout, after=SAVE)
    cpu = train(tmp_path, "-n", "2", "--devices", "cpu", device='"cpu"', before=f"{without_dropout}; {LOAD}")
    require_close(cpu, wanted)
    train(tmp_path, "-n", "2", "--devices", "cpu", device='"cpu"', before=without_dropout, after=SAVE)
    require_close(train(tmp_path, "-n", "2", before=f"{without_dropout}; {LOAD}"), wanted)


@pytest.mark.parametrize("zero", ["optimizer", "gradients", "parameters"])
def test_states_in_host_memory_give_the_same_training(tmp_path, zero):
    found = train(tmp_path, "-n", "2", job=f', zero="{zero}", offload=True', epochs=2)
    require_close(found, train(tmp_path, "-n", "1", epochs=2))


@pytest.mark.parametrize("loader", [', device="cuda"', ', device="cuda", num_workers=2', ", num_workers=1"])
def test_a_loader_copies_batches_to_the_gpu(tmp_path, loader):
    require_close(train(tmp_path, "-n", "2", loader=loader), train(tmp_path, "-n", "1"))


@pytest.mark.parametrize("options", ["", ', random="counter"', ', zero="parameters"'])
@pytest.mark.parametrize("loader", ["", ", num_workers=1"])
def test_a_default_device_changes_nothing(tmp_path, loader, options):
    # Plain PyTorch too refuses to shuffle by a generator of the CPU under another default device.
    job = {
        "job": options,
        "loader": f", generator=torch.Generator(model[0].weight.device){loader}",
        "after": f"{SAVE}\n{LOAD}",
    }
    found = train(tmp_path, "-n", "2", before='torch.set_default_device("cuda")', **job)
    require_close(found, train(tmp_path, "-n", "2", **job))


def test_dropout_that_cudnn_draws_is_refused_with_a_fix(tmp_path):
    text = (SCRIPTS / "train_models.py").read_text().replace("cudnn.flags(enabled=False)", "cudnn.flags(enabled=True)")
    (tmp_path / "script.py").write_text(text)
    command = ("run", "-n", "2", "--no-progress", "script.py", "--model", "tagger", "--device", "cuda")
    done = rankless(*command, folder=tmp_path)
    assert done.returncode != 0
    assert "with torch.backends.cudnn.flags(enabled=False):" in done.stdout + done.stderr
    done = rankless(*command, "--dropout", "0", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_model_on_the_cpu_is_refused_with_a_fix(tmp_path):
    done = run_script(
        TRAINING.format(device='"cpu"', epochs=1, before="", after="", options="", loader=""),
        "-n",
        "2",
        folder=tmp_path,
    )
    assert done.returncode != 0
    assert "model.to('cuda')" in done.stdout + done.stderr


DDP = """
import torch, torch.distributed as dist, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
import os

rank, backend = int(os.environ["RANK"]), "{backend}"
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
torch.cuda.set_device(device)
dist.init_process_group(backend)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 4).double().to(device), device_ids=[device.index])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(12, 8, dtype=torch.float64)[rank :: dist.get_world_size()].to(device)
for _ in range(3):
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()
total = torch.tensor([float(sum(item.sum() for item in model.parameters()))], device=device, dtype=torch.float64)
parts = [torch.empty_like(total) for _ in range(dist.get_world_size())]
dist.all_gather(parts, total)
objects = [None] * dist.get_world_size()
dist.all_gather_object(objects, rank)
assert objects == list(range(dist.get_world_size())), objects
dist.barrier()
if rank == 0:
    print("RESULT", *(float(part) for part in parts), dist.get_backend())
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("workers", "backend"), [(1, "nccl"), (2, "gloo"), (2, "cpu:gloo,cuda:gloo")])
def test_a_foreign_script(tmp_path, workers, backend):
    done = run_script(DDP.format(backend=backend), "-n", str(workers), "--no-progress", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    *values, _ = re.search("RESULT (.*)", done.stdout).group(1).split()
    assert len(values) == workers
    assert float(values[0]) == pytest.approx(1.0, abs=10)
    assert len(set(values)) == 1


HOROVOD = """
import torch
import horovod.torch as hvd

hvd.init()
torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4)).double().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(6, 8, dtype=torch.float64, device="cuda")).square().sum().backward()
    optimizer.step()
total = sum(item.detach().sum() for item in model.parameters())
gathered = hvd.allgather(total.reshape(1))
assert gathered.is_cuda
parts, splits = hvd.alltoall(torch.arange(hvd.size(), device="cuda"), torch.ones(hvd.size(), dtype=torch.int32))
assert parts.tolist() == [hvd.rank()] * hvd.size(), parts
assert hvd.allreduce(torch.ones(3, device="cuda", dtype=torch.bfloat16), op=hvd.Sum).tolist() == [hvd.size()] * 3
if hvd.rank() == 0:
    print("RESULT", *gathered.tolist())
"""


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_horovod_script(tmp_path, workers):
    done = run_script(HOROVOD, "-n", str(workers), "--no-progress", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(set(re.search("RESULT (.*)", done.stdout).group(1).split())) == 1


def test_the_doctor_sees_the_gpu(tmp_path):
    done = rankless("doctor", "-n", "2", "--json", folder=tmp_path)
    print(done.stdout, done.stderr)
    assert "GPU" in done.stdout
    assert json.loads(done.stdout)


def test_a_plan_names_the_gpu(tmp_path):
    text = TRAINING.format(device='"cuda"', epochs=1, before="", after="", options="", loader="")
    (tmp_path / "script.py").write_text(text)
    done = rankless("plan", "-n", "2", "script.py", folder=tmp_path)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr


KILLED = """
import os, signal, torch, rankless
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@rankless.job(model=model, optimizer=optimizer)
def train(x):
    return model(x).sum()

for step in range(100):
    if step == 5 and rankless.rank() == 1:
        {fault}
    train(torch.ones(4, 4))
"""


@pytest.mark.parametrize(
    "fault",
    [
        "os.kill(os.getpid(), signal.SIGKILL)",
        "raise KeyError(3)",
        "torch.empty(1 << 50, device='cuda')",
        "torch.zeros(2, device='cuda')[torch.tensor([7], device='cuda')].sum().item()",
    ],
)
def test_a_failed_worker_ends_the_run_with_its_name(tmp_path, fault):
    done = run_script(KILLED.format(fault=fault), "-n", "2", "--no-progress", folder=tmp_path)
    print(done.stdout, done.stderr)
    assert done.returncode != 0

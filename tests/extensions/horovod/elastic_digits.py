"""An elastic training as Horovod's users write it, which also records what it does.

Arguments: epochs, and how long to pause in each batch. Into the current folder: `done.PID`, a line for each batch that
is saved (steps, epoch, size, the samples of all ranks), and `began.PID`, a line each time the training
function begins (rank, world size, steps).
"""

import os
import sys
import time

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, PAUSE = int(sys.argv[1]), float(sys.argv[2])

assert os.environ["HOROVOD_RANK"].isdigit()
hvd.init()
torch.manual_seed(hvd.rank())  # so that only what is sent around makes workers alike
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images[:600]) / 16, torch.tensor(labels[:600])
data = TensorDataset(images, labels, torch.arange(len(images)))
sampler = hvd.elastic.ElasticSampler(data, seed=7)
loader = DataLoader(data, batch_size=25, sampler=sampler)
model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def write_down(name: str, *facts: object) -> None:
    with open(f"{name}.{os.getpid()}", "a") as file:
        file.write(" ".join(map(str, facts)) + "\n")


@hvd.elastic.run
def train(state):
    variables = [int(os.environ[f"HOROVOD_{name}"]) for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    assert variables == [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()]
    write_down("began", hvd.rank(), hvd.size(), state.steps)
    while state.epoch < EPOCHS:
        for batch, (rows, targets, numbers) in enumerate(loader):
            time.sleep(PAUSE)
            optimizer.zero_grad()
            F.cross_entropy(model(rows), targets).backward()
            optimizer.step()
            samples = hvd.allgather(numbers, name="numbers").tolist()
            state.sampler.record_batch(batch, len(rows))
            state.steps += 1
            epoch = state.epoch
            if state.sampler.processed_num >= len(data):
                state.epoch += 1
                state.sampler.set_epoch(state.epoch)
            state.save()
            write_down("done", state.steps, epoch, hvd.size(), ",".join(map(str, samples)))
            state.check_host_updates()


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, steps=0)
train(state)
total = sum(parameter.abs().sum().item() for parameter in model.parameters())
accuracy = (model(images).argmax(1) == labels).double().mean().item()
print(f"end {state.steps} {accuracy:.3f} {total!r}", flush=True)

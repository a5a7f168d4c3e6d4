"""Trains dense models without tables while workers of two kinds are killed, in forms that are odd; prints numbers."""

import argparse
import json
import os
import signal
import tempfile

import torch
import torch.nn.functional as F
from torch import nn

import rankless

parser = argparse.ArgumentParser()
parser.add_argument("case")
parser.add_argument("--plain", action="store_true")
arguments = parser.parse_args()
RANK = int(os.environ.get("RANK", 0))
KILLS = [part.split(":") for part in os.environ.get("KILLS", "").split(",") if part]
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
INPUTS = torch.cos(torch.outer(torch.arange(60.0), torch.tensor([1.0, 2.5, 0.3])))
TARGETS = torch.sin(torch.arange(60.0))[:, None]


class Model(nn.Module):
    """A layer of each kind."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 1))

    def forward(self, inputs):
        return self.layers(self.first(inputs))


class Noisy(torch.utils.data.Dataset):
    """Draws a number for each sample that is read."""

    def __len__(self):
        return len(INPUTS)

    def __getitem__(self, index):
        return INPUTS[index] + 0.1 * torch.rand(()), TARGETS[index]


class Stream(torch.utils.data.IterableDataset):
    """Yields all samples in order."""

    def __iter__(self):
        yield from zip(INPUTS, TARGETS, strict=True)


def reach(moment):
    if [str(RANK), str(moment)] in KILLS:
        os.kill(os.getpid(), signal.SIGKILL)


def watch(owner, name, moment):
    function, count = getattr(owner, name), 0

    def watched(*given, **options):
        nonlocal count
        reach(f"{moment}{count}")
        count += 1
        return function(*given, **options)

    setattr(owner, name, watched)


def make_job(model, optimizer, clip=None, **options):
    """Return a function that trains on a batch, and returns the loss."""

    def measure(inputs, targets):
        return F.mse_loss(model(inputs), targets)

    if not arguments.plain:
        rankless.parameter_server.mark_dense(model.layers)
        return rankless.job(model=model, optimizer=optimizer, clip_norm=clip, **options)(measure)
    calls = 0

    def train(inputs, targets):
        nonlocal calls
        loss = measure(inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss.detach()

    return train


def load(data, **options):
    make = torch.utils.data.DataLoader if arguments.plain else rankless.loader
    return make(data, batch_size=7, **options)


PAIRS = torch.utils.data.TensorDataset(INPUTS, TARGETS)


def run(train, loader, epochs=2):
    found = []
    for _ in range(epochs):
        for inputs, targets in loader:
            reach(len(found))
            found.append(train(inputs, targets).item())
    return found


def end(model, optimizer):
    values = [value.detach().flatten() for value in model.parameters()]
    states = [entry.flatten() for state in optimizer.state.values() for entry in state.values()]
    return torch.cat([*values, *states]).tolist()


def clip_norm():
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    train = make_job(model, optimizer, clip=0.3)
    return run(train, load(PAIRS, shuffle=True)) + end(model, optimizer)


def draw_while_reading():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    loader = load(Noisy(), shuffle=True, **({} if arguments.plain else {"reading": "replicated"}))
    return run(make_job(model, optimizer), loader) + end(model, optimizer)


def stream():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return run(make_job(model, optimizer), load(Stream())) + end(model, optimizer)


def keep_wholes():
    """The script keeps tensors that share the memory of parameters and of optimizer states."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    train, found = make_job(model, optimizer), []
    weight = model.layers[0].weight.data
    for step, (inputs, targets) in enumerate(load(PAIRS)):
        reach(step)
        found.append(train(inputs, targets).item())
        found.append(weight.sum().item())
        if step == 2:
            state = optimizer.state[model.layers[3].weight]["momentum_buffer"].data
            layer = optimizer.state_dict()["state"][2]["momentum_buffer"]
        if step > 2:
            found += [state.abs().sum().item(), layer.abs().sum().item()]
        reach(f"between{step}")
        if step in (3, 6):
            weight.mul_(0.9)
            state.mul_(0.5)
        reach(f"after{step}")
    return found + end(model, optimizer)


def two_jobs():
    model, other = Model(), Model()
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    second = torch.optim.Adagrad(other.parameters(), 0.05)
    train, later, found = make_job(model, optimizer), make_job(other, second), []
    for step, (inputs, targets) in enumerate(load(PAIRS)):
        reach(step)
        found.append(train(inputs, targets).item())
        reach(f"between{step}")
        if step > 3:
            found.append(later(inputs, targets).item())
    return found + end(model, optimizer) + end(other, second)


def save_and_load():
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    train, loader, found = make_job(model, optimizer), load(PAIRS), []
    folder = rankless.once(tempfile.mkdtemp)
    for step, (inputs, targets) in enumerate(loader):
        reach(step)
        found.append(train(inputs, targets).item())
        if step == 4:
            reach("save")
            rankless.save(os.path.join(folder, "checkpoint"), model=model, optimizer=optimizer, layout="sharded")
    rankless.load(os.path.join(folder, "checkpoint"), model=model, optimizer=optimizer)
    reach("loaded")
    return found + run(train, loader, 1) + end(model, optimizer)


def load_state_dict():
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    train, loader = make_job(model, optimizer), load(PAIRS)
    found = run(train, loader, 1)
    reach("copy")
    copied = [{name: value + 0 for name, value in model.state_dict().items()}, optimizer.state_dict()]
    reach("copied")
    found += run(train, loader, 1)
    reach("load")
    model.load_state_dict(copied[0])
    optimizer.load_state_dict(copied[1])
    reach("loaded")
    return found + run(train, loader, 1) + end(model, optimizer)


def whole_optimizers():
    """Optimizers that read whole tensors, several groups, one of them added later."""
    model = Model()
    optimizer = torch.optim.Adafactor([*model.first.parameters(), *model.layers[0].parameters()], 0.05)
    train, loader = make_job(model, optimizer), load(PAIRS)
    found = run(train, loader, 1)
    reach("add")
    optimizer.add_param_group({"params": list(model.layers[3].parameters()), "lr": 0.01})
    return found + run(train, loader, 1) + end(model, optimizer)


def accumulate():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    if not arguments.plain:
        return run(make_job(model, optimizer, accumulate=2), load(PAIRS))
    found = []
    for _ in range(2):
        batches = list(load(PAIRS))
        for first in range(0, len(batches), 2):
            step = batches[first : first + 2]
            rows = sum(len(inputs) for inputs, _ in step)
            optimizer.zero_grad()
            for inputs, targets in step:
                loss = F.mse_loss(model(inputs), targets)
                found.append(loss.item())
                (loss * len(inputs) / rows).backward()
            optimizer.step()
    return found


def flush_later():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    train = make_job(model, optimizer, accumulate=3)
    train(INPUTS[:7], TARGETS[:7])
    if not arguments.plain:
        reach("flush")
        rankless.once(lambda: 0)
        train.flush()
    return end(model, optimizer)


def many_layers():
    """Each worker has parameters."""
    model = Model()
    model.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)], nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return run(make_job(model, optimizer), load(PAIRS)) + end(model, optimizer)


def list_pieces():
    """Write the bits of what this worker has of each parameter and state after ten steps."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    run(make_job(model, optimizer), load(PAIRS))
    entries = [entry for state in optimizer.state.values() for entry in state.values() if entry.dim()]
    pieces = [known.partition.shard.detach() for known in [*model.parameters(), *entries]]
    return [piece.contiguous().view(torch.int64).flatten().tolist() for piece in pieces]


if not arguments.plain:
    from rankless.ownership import sharded_state_owner, states_of_survivors

    watch(sharded_state_owner, "share_state", "share")
    watch(sharded_state_owner.ShardedStateOwner, "measure_norm", "norm")
    watch(states_of_survivors, "broadcast", "send")
numbers = globals()[arguments.case]()
print(json.dumps(numbers), flush=True)
if not arguments.plain:
    with open(f"numbers{RANK}.new", "w") as file:
        json.dump(numbers, file)
    os.replace(f"numbers{RANK}.new", f"numbers{RANK}.json")

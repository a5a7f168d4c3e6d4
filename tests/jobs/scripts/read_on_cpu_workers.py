"""Trains cases of a loader whose batches workers on the CPU read, and writes each case's numbers as a line of JSON.

Each rank writes them to a file of its own, with the number of samples that it has read.
"""

import argparse
import copy
import json
import os
import pickle
import random

import numpy
import torch
import torch.nn.functional as F
from data_for_cpu_workers import Data, Drawing, Failing, Ids, Named, Pair, WholeBatches
from torch import nn

import rankless

torch.set_default_dtype(torch.float64)


class Opaque:
    """A value that ranks cannot send each other."""


def collate_with_draws(samples):
    numbers, targets = torch.utils.data.default_collate(samples)
    return numbers + torch.rand(()) + numpy.random.random(), targets


def collate_oddly(samples):
    numbers, targets = torch.utils.data.default_collate(samples)
    return {
        "named": Named(numbers, targets, [f"sample {value:.2f}" for value in targets.tolist()]),
        "odd": [
            (numbers > 0, numbers.half(), None, 1.5),
            torch.tensor(2.0),
            targets[:1].expand(len(targets)),
            numbers.t(),
            numbers[:, ::2],
            numbers[:0],
        ],
        "pair": Pair(numbers.to(torch.complex128), targets.to(torch.int8)),
    }


def make_training():
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(6, 5), rankless.parameter_server.mark_dense(nn.Sequential(nn.Tanh(), nn.Linear(5, 1)))
    )
    optimizer = torch.optim.Adam(model.parameters(), 0.05)

    @rankless.job(model=model, optimizer=optimizer)
    def train(numbers, targets):
        return F.mse_loss(model(numbers).squeeze(1), targets)

    return model, train


def run_epochs(loader, epochs=2):
    _, train = make_training()
    found = []
    for _ in range(epochs):
        for numbers, targets in loader:
            found += [train(numbers, targets).item(), numbers.shape[0], len(targets), numbers.dtype.itemsize]
        found += [torch.rand(()).item(), random.random(), numpy.random.random()]
    return found


def plainly(data):
    return run_epochs(rankless.loader(data, batch_size=5, shuffle=True))


def drawing_samples(data):
    return run_epochs(rankless.loader(data, batch_size=4, shuffle=True, seed=3))


def drawing_in_collation(data):
    return run_epochs(rankless.loader(data, batch_size=4, collate_fn=collate_with_draws, reading="split"), 1)


def own_generator(data):
    generator = torch.Generator().manual_seed(4)
    found = run_epochs(rankless.loader(data, batch_size=6, shuffle=True, generator=generator, drop_last=True))
    return [*found, torch.rand((), generator=generator).item()]


def drawing_sampler(data):
    return run_epochs(rankless.loader(data, batch_size=4, sampler=Drawing()))


def drawing_sampler_ahead(data):
    return run_epochs(rankless.loader(data, batch_size=3, sampler=Drawing(), num_workers=2, prefetch_factor=1))


def persistent_readers(data):
    return run_epochs(rankless.loader(data, batch_size=5, shuffle=True, num_workers=1, persistent_workers=True), 3)


def whole_batches(data):
    return run_epochs(rankless.loader(data, batch_size=None, shuffle=True))


def replicated(data):
    return run_epochs(rankless.loader(data, batch_size=5, shuffle=True, reading="replicated"))


def leave_early(data):
    _, train = make_training()
    loader, found = rankless.loader(data, batch_size=4, shuffle=True), []
    for _ in range(3):
        for step, (numbers, targets) in enumerate(loader):
            found.append(train(numbers, targets).item())
            if step == 2:
                break
        found.append(torch.rand(()).item())
    return found


def resume(data):
    _, train = make_training()
    loader, found = rankless.loader(data, batch_size=4, shuffle=True), []
    batches = iter(loader)
    for _ in range(2):
        found.append(train(*next(batches)).item())
    state = loader.state_dict()
    again = rankless.loader(data, batch_size=4, shuffle=True)
    again.load_state_dict(state)
    found += [train(numbers, targets).item() for numbers, targets in again]
    return [*found, torch.rand(()).item()]


def odd_batches(data):
    _, train = make_training()
    found = []
    for batch in rankless.loader(data, batch_size=9, collate_fn=collate_oddly):
        named, odd = batch["named"], batch["odd"]
        found.append(train(named.numbers, named.targets).item())
        found.append(train(odd[3].t() * 2, odd[2]).item())
        found.append(train(odd[0][1].double(), named.targets.to(torch.float32).to(torch.float64)).item())
        found += [odd[0][0].sum().item(), odd[0][3], odd[1].item(), odd[4].sum().item(), odd[5].shape[1]]
        found += [float(len(name)) for name in named.names]
        found += [batch["pair"].numbers.real.sum().item(), batch["pair"].targets.sum().item()]
    return found


def use_outside_jobs(data):
    _, train = make_training()
    found = []
    for numbers, targets in rankless.loader(data, batch_size=8, shuffle=True):
        before = train(numbers, targets).item()
        numbers.mul_(1.5)
        copied = copy.deepcopy(targets), pickle.loads(pickle.dumps(numbers))
        found += [before, train(numbers, targets).item(), train(copied[1], copied[0]).item()]
        found += [*numbers[:, 0].tolist(), targets.numpy().sum().item(), sum(float(row[1]) for row in numbers)]
        found.append(train(torch.cat([numbers, numbers]), torch.cat([targets, targets + 1])).item())
        found.append(float(targets.max() > 0.5))
        found.append(train(numbers.to(torch.float32).to(torch.float64), targets.clone()).item())
    return found


def read_values_in_jobs(data):
    model, train = make_training()

    @rankless.job(model=model)
    def look(numbers, targets):
        scores = model(numbers).squeeze(1)
        if targets.sum().item() > 0:
            scores = scores * 2
        return scores, targets, numbers[0], (scores - targets).abs().max()

    @rankless.job(model=model, capture=False)
    def look_plainly(numbers, targets):
        return (model(numbers).squeeze(1) * targets).sum().item()

    found = []
    for numbers, targets in rankless.loader(data, batch_size=7):
        found.append(train(numbers, targets).item())
        found += torch.cat([value.flatten() for value in look(numbers, targets)]).tolist()
        found.append(look_plainly(numbers, targets))
    return found


def single_samples(data):
    return run_epochs(rankless.loader(data, batch_size=1), 1) + run_epochs(rankless.loader(data, batch_size=22), 1)


def accumulate(data):
    model, _ = make_training()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    @rankless.job(model=model, optimizer=optimizer, accumulate=2)
    def train(numbers, targets):
        return F.mse_loss(model(numbers).squeeze(1), targets)

    return [train(*batch).item() for _ in range(2) for batch in rankless.loader(data, batch_size=7)]


def look_up(data):
    table = rankless.parameter_server.Embedding(3, initial=rankless.parameter_server.Normal(std=0.3), seed=1)
    model, _ = make_training()
    optimizers = [torch.optim.Adagrad(table.parameters(), lr=0.1), torch.optim.Adam(model.parameters(), 0.05)]

    @rankless.job(model=[table, model], optimizer=optimizers)
    def train(ids, numbers, targets):
        return F.mse_loss(model(numbers + table(ids).flatten(1)).squeeze(1), targets)

    return [train(*batch).item() for _ in range(2) for batch in rankless.loader(data, batch_size=6, shuffle=True)]


def two_loaders(data):
    _, train = make_training()
    first = rankless.loader(data, batch_size=4, shuffle=True)
    second = rankless.loader(data, batch_size=3, num_workers=1, shuffle=True)
    found = []
    for one, other in zip(first, second, strict=False):
        found += [train(*one).item(), train(*other).item(), (one[1].sum() + other[1].sum()).item()]
    return found


def save_and_load(data):
    model, train = make_training()
    folder = os.path.join(arguments.folder, "checkpoint" if "RANK" in os.environ else "plain-checkpoint")
    loader, found = rankless.loader(data, batch_size=4, shuffle=True), []
    for step, batch in enumerate(loader):
        found.append(train(*batch).item())
        if step == 2:
            rankless.save(folder, model=model, loader=loader)
            break
    rankless.load(folder, model=model, loader=loader)
    return found + [train(*batch).item() for batch in loader]


def from_first_rank(data):
    return run_epochs(rankless.loader(data, batch_size=5, shuffle=True, reading="first"), 1)


def on_device(data):
    loader = rankless.loader(data, batch_size=5, shuffle=True, device="cpu", num_workers=1)
    return run_epochs(loader, 2)


def opaque_values(data):
    _, train = make_training()

    def collate(samples):
        return *torch.utils.data.default_collate(samples), Opaque()

    for numbers, targets, _ in rankless.loader(data, batch_size=5, collate_fn=collate):
        train(numbers, targets)
    return []


def damaged_sample(_data):
    return run_epochs(rankless.loader(Failing(), batch_size=5), 1)


def read_in_closure(data):
    model, _ = make_training()
    current = {}

    @rankless.job(model=model)
    def measure(numbers):
        return F.mse_loss(model(numbers).squeeze(1), current["targets"])

    for numbers, current["targets"] in rankless.loader(data, batch_size=5):
        measure(numbers)
    return []


def read_on_one_rank(data):
    _, train = make_training()
    for numbers, targets in rankless.loader(data, batch_size=5):
        train(numbers, targets)
        if os.environ.get("RANK", "0") == "0":
            print(targets.sum())
        else:
            train(numbers, targets)
    return []


CASES = {
    function.__name__: function
    for function in (
        plainly,
        drawing_samples,
        drawing_in_collation,
        own_generator,
        drawing_sampler,
        drawing_sampler_ahead,
        persistent_readers,
        whole_batches,
        replicated,
        leave_early,
        resume,
        odd_batches,
        use_outside_jobs,
        read_values_in_jobs,
        single_samples,
        accumulate,
        look_up,
        two_loaders,
        save_and_load,
        from_first_rank,
        on_device,
    )
}
parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--cases", default=",".join(CASES))
arguments = parser.parse_args()
REFUSED = {
    function.__name__: function for function in (opaque_values, damaged_sample, read_in_closure, read_on_one_rank)
}
rank = os.environ.get("RANK", "plain")
with open(os.path.join(arguments.folder, f"rank-{rank}"), "w") as file:
    for name in arguments.cases.split(","):
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        kind = {"whole_batches": WholeBatches, "look_up": Ids}.get(name, Data)
        data = kind(draw=name == "drawing_samples")
        numbers = (CASES | REFUSED)[name](data)
        file.write(json.dumps({"case": name, "numbers": numbers, "reads": data.reads}) + "\n")
        file.flush()

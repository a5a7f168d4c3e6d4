"""Trainings whose states are divided between workers, and that a checkpoint interrupts.

Each function of `TRAININGS` returns a model, optimizers, the loss of a batch, and a batch of a given number.
"""

import torch
from torch import nn

from rankless.checkpoint import SaveOptions, Saver, load
from rankless.context.world import World
from rankless.deferred_models.build_and_materialize import DeferredBuild
from rankless.jobs.job import divide_states_of_jobs, make_job
from rankless.jobs.job_definition import StepOptions
from rankless.parallel.mesh import Mesh


def perceptron(optimizer=torch.optim.AdamW, **options):
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 4))
    return model, [optimizer(model.parameters(), **{"lr": 0.01, **options})], lambda x: model(x).square().mean()


def momentum():
    return perceptron(torch.optim.SGD, lr=0.1, momentum=0.9)


def no_state():
    return perceptron(torch.optim.SGD, lr=0.1)


def adagrad():
    return perceptron(torch.optim.Adagrad, lr=0.1)


def amsgrad():
    return perceptron(amsgrad=True)


def adafactor():
    return perceptron(torch.optim.Adafactor, lr=0.1)


def muon():
    model, _, loss = perceptron()
    matrices = [item for item in model.parameters() if item.dim() == 2]
    others = [item for item in model.parameters() if item.dim() != 2]
    return model, [torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(others, lr=0.01)], loss


def tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(11, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, x):
            return self.head(torch.tanh(x)) + self.tokens((x[:, 0].abs() * 3).long())[:, :1]

    model = Tied()
    return model, [torch.optim.AdamW(model.parameters(), lr=0.01)], lambda x: model(x).square().mean()


def frozen_with_buffers():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model[0].weight.requires_grad_(False)
    model.register_buffer("table", torch.randn(7, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, [optimizer], lambda x: (model(x) * model.table[1]).square().mean()


def channels_last():
    model = nn.Sequential(nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 5, 1)).to(memory_format=torch.channels_last)
    return model, [torch.optim.AdamW(model.parameters(), lr=0.01)], lambda x: model(x.view(-1, 3, 2, 1)).square().mean()


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 6).t())
        self.gaps = nn.Parameter(torch.randn(4, 10)[:, ::2])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.row = nn.Parameter(torch.randn(1, 6))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.wide = nn.Parameter(torch.randn(2, 6, 8))

    def forward(self, x):
        hidden = (x * self.scale + self.row) @ self.weight @ self.gaps.t()
        return hidden.sum() + (x @ self.wide).square().mean() + self.nothing.sum()


def odd_shapes():
    model = Odd()
    return model, [torch.optim.AdamW(model.parameters(), lr=0.01)], lambda x: model(x).square()


def groups_and_schedule():
    model, _, loss = perceptron()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.05}, {"params": model[2:].parameters(), "weight_decay": 0.1}],
        lr=0.1,
        momentum=0.9,
    )
    return model, [optimizer], loss


TRAININGS = {
    item.__name__: item
    for item in (
        *(perceptron, momentum, no_state, adagrad, amsgrad, adafactor, muon, tied, frozen_with_buffers),
        *(channels_last, odd_shapes, groups_and_schedule),
    )
}


def make_batch(number):
    return torch.randn(12, 6, generator=torch.Generator().manual_seed(number))


def show(model, optimizers):
    """Return the values of a model and its optimizers."""
    found = [item.detach().clone() for item in model.state_dict().values()]
    for optimizer in optimizers:
        for parameter in (item for group in optimizer.param_groups for item in group["params"]):
            entries = optimizer.state.get(parameter, {})
            found += [entries[key].detach().clone() for key in sorted(entries)]
    return found


def train_plainly(name, steps, dtype=torch.float64):
    """Return what a plain PyTorch script computes in some steps on one device."""
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(3)
        model, optimizers, loss = TRAININGS[name]()
        for number in range(steps):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss(make_batch(number)).backward()
            for optimizer in optimizers:
                optimizer.step()
        return show(model, optimizers)
    finally:
        torch.set_default_dtype(torch.float32)


class Training:
    """A training on a mesh, with states divided as `zero` says."""

    def __init__(self, mesh, name, zero, *, seed=3, deferred=False):
        torch.manual_seed(seed)
        self.world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)
        self.saver = Saver(mesh=mesh, owner=self.world.owner)
        if deferred:
            with DeferredBuild():
                self.model, self.optimizers, loss = TRAININGS[name]()
        else:
            self.model, self.optimizers, loss = TRAININGS[name]()
        self.job = make_job(
            loss,
            model=self.model,
            optimizer=self.optimizers,
            view=None,
            world=lambda: self.world,
            step_options=StepOptions(zero=zero),
        )

    @property
    def objects(self):
        """What is saved."""
        return {"model": self.model, **{f"optimizer{number}": item for number, item in enumerate(self.optimizers)}}

    def train(self, first, last):
        """Make the steps from `first` to before `last`."""
        for number in range(first, last):
            self.job(make_batch(number))

    def save(self, path, **options):
        """Save, and return when the checkpoint is on disk."""
        self.saver.save(path, self.objects, options=SaveOptions(**options))
        self.saver.wait()

    def load(self, path, *, divide_first=True):
        """Load as `rankless.load` does; or as before a job exists, with `divide_first=False`."""
        if divide_first:
            divide_states_of_jobs(self.objects.values())
        load(path, self.objects, mesh=self.world.mesh, owner=self.world.owner)

    def show(self):
        """Return all values, whole."""
        return show(self.model, self.optimizers)


def save_training(mesh, path, name, zero, dtype=torch.float64, **options):
    """Train two steps, save, and train two more. Return all values."""
    torch.set_default_dtype(dtype)
    try:
        training = Training(mesh, name, zero)
        training.train(0, 2)
        training.save(path, **options)
        training.train(2, 4)
        return training.show()
    finally:
        torch.set_default_dtype(torch.float32)


def continue_training(mesh, path, name, zero, dtype=torch.float64, deferred=False, divide_first=True, called=0):
    """Load into a model with other values, which has made `called` steps, and train two steps. Return all values."""
    torch.set_default_dtype(dtype)
    try:
        training = Training(mesh, name, zero, seed=11, deferred=deferred)
        training.train(0, called)
        training.load(path, divide_first=divide_first)
        training.train(2, 4)
        return training.show()
    finally:
        torch.set_default_dtype(torch.float32)


SOLO = Mesh.solo()

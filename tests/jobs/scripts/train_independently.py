"""Trainings whose workers take turns. Without `rankless` as the first argument they run as plain PyTorch.

With W workers in the mode async, a prediction after every step lets all workers meet. So worker i mod W makes step i
with the result of step i - 1, and every optimizer must be where it would be on one device.
"""

import json
import sys

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, SparseAdam
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, OneCycleLR

RANKLESS = sys.argv[1] == "rankless"
if RANKLESS:
    import rankless

torch.set_default_dtype(torch.float64)
STEPS, ROWS, WIDTH = 8, 6, 5


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 300), nn.Linear(300, 1)
        self.scale = nn.Parameter(torch.ones(()))
        self.turned = nn.Parameter(torch.randn(7, WIDTH).t())
        self.unused = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, inputs):
        hidden = torch.tanh(self.first(inputs * self.frozen))
        return self.second(hidden) * self.scale + (inputs @ self.turned).sum(-1, keepdim=True) / 10


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, inputs):
        return self.second(torch.relu(self.first(inputs)))


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=True, padding_idx=3)
        self.bag = nn.EmbeddingBag(9, 4, mode="sum", sparse=True)

    def forward(self, inputs):
        ids = (inputs.abs() * 5).long() % 9
        rows = self.table(ids[:, :2]).sum(1) + self.table(ids[:, 2]) * self.bag(ids[:, 3:])
        return self.join(rows)

    def join(self, rows):
        return rows.sum(-1, keepdim=True)


class Mixed(Sparse):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 1)

    def join(self, rows):
        return self.head(torch.tanh(rows))


def groups(model):
    return [
        {"params": model.first.parameters(), "lr": 0.001},
        {"params": [model.second.weight], "weight_decay": 0.3},
        {"params": [model.second.bias, model.scale, model.turned, model.unused]},
    ]


def cycle(optimizer):
    return OneCycleLR(optimizer, max_lr=[0.01] * len(optimizer.param_groups), total_steps=STEPS)


CASES = {
    "sgd": (Model, lambda model: SGD(model.parameters(), 0.005), None, {}),
    "momentum": (
        Model,
        lambda model: SGD(groups(model), 0.002, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda optimizer: ExponentialLR(optimizer, 0.9),
        {},
    ),
    "dampening": (Model, lambda model: SGD(model.parameters(), 0.002, momentum=0.9, dampening=0.5), cycle, {}),
    "adagrad": (
        Model,
        lambda model: Adagrad(groups(model), 0.05, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.5),
        None,
        {},
    ),
    "adam": (
        Model,
        lambda model: Adam(groups(model), 0.01, weight_decay=0.1),
        lambda optimizer: CosineAnnealingLR(optimizer, STEPS),
        {},
    ),
    "one_cycle": (Model, lambda model: Adam(groups(model), 0.01), cycle, {}),
    "amsgrad": (Model, lambda model: Adam(model.parameters(), 0.01, amsgrad=True, maximize=True), None, {}),
    "adamw": (Model, lambda model: AdamW(groups(model), 0.01, betas=(0.5, 0.9), eps=1e-3), None, {}),
    "tied": (Tied, lambda model: AdamW(model.parameters(), 0.01), None, {}),
    "clipped": (Model, lambda model: SGD(model.parameters(), 0.05, momentum=0.9), None, {"clip_norm": 0.1}),
    "sparse_sgd": (Mixed, lambda model: SGD(model.parameters(), 0.05), cycle, {}),
    "sparse_momentum": (
        Sparse,
        lambda model: SGD(model.parameters(), 0.02, momentum=0.9, nesterov=True),
        lambda optimizer: ExponentialLR(optimizer, 0.9),
        {},
    ),
    "sparse_adagrad": (
        Mixed,
        lambda model: Adagrad(model.parameters(), 0.1, lr_decay=0.1, initial_accumulator_value=0.2),
        None,
        {},
    ),
    "sparse_adam": (
        Sparse,
        lambda model: SparseAdam(list(model.parameters()), 0.05, betas=(0.5, 0.9)),
        lambda optimizer: ExponentialLR(optimizer, 0.9),
        {},
    ),
    "tensor_rate": (Model, lambda model: Adam(model.parameters(), torch.tensor(0.01)), None, {}),
}


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(STEPS)]


def loss_of(model, inputs):
    return (model(inputs) - inputs.sum(-1, keepdim=True).sin()).square().mean()


def train_plainly(model, optimizer, scheduler, options):
    losses = []
    for inputs in batches():
        optimizer.zero_grad()
        loss = loss_of(model, inputs)
        loss.backward()
        if options:
            nn.utils.clip_grad_norm_(model.parameters(), options["clip_norm"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss_of(model, inputs).item())
    return losses


def train_with_rankless(model, optimizer, scheduler, options):
    @rankless.job(model=model, optimizer=optimizer, **options)
    def train(inputs):
        return loss_of(model, inputs)

    @rankless.job(model=model)
    def predict(inputs):
        return loss_of(model, inputs)

    losses = []
    for inputs in batches():
        train(inputs)
        assert train.stepped
        if scheduler is not None:
            scheduler.step()
        losses.append(predict(inputs).item())
    return losses


def flatten(state):
    if isinstance(state, torch.Tensor):
        state = state.to_dense() if state.is_sparse else state
        return state.detach().reshape(-1).tolist()
    if isinstance(state, dict):
        return {str(key): flatten(value) for key, value in state.items()}
    return [flatten(value) for value in state] if isinstance(state, list | tuple) else state


results = {}
for name, (kind, make_optimizer, make_scheduler, options) in CASES.items():
    torch.manual_seed(0)
    model = kind()
    optimizer = make_optimizer(model)
    scheduler = None if make_scheduler is None else make_scheduler(optimizer)
    losses = (train_with_rankless if RANKLESS else train_plainly)(model, optimizer, scheduler, options)
    results[name] = {
        "losses": losses,
        "model": flatten(model.state_dict()),
        "states": flatten(optimizer.state_dict()["state"]),
    }
print("RESULT", json.dumps(results))

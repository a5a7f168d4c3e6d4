"""Trains rows and a parameter whose gradients do not depend on their values: each step adds a number of its own.

Prints all of them at the end. With --plain it is plain PyTorch, where the order of steps changes no more than rounding.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--plain", action="store_true")
parser.add_argument("--steps", type=int, default=60)
arguments = parser.parse_args()
import rankless  # noqa: E402  # the plain training uses it for the initial values of rows only

torch.set_default_dtype(torch.float64)
VOCABULARY = torch.arange(20)


class PlainTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rows = rankless.parameter_server.Embedding(3, seed=2)(VOCABULARY).detach()
        self.rows = nn.Embedding.from_pretrained(rows, freeze=False, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = PlainTable() if arguments.plain else rankless.parameter_server.Embedding(3, seed=2)
        self.scale = nn.Parameter(torch.zeros(5))

    def forward(self, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (self.table(ids).sum(-1) * weights).mean() + (self.scale * weights[:5]).sum()


model = Model()
optimizers = [torch.optim.SGD(model.table.parameters(), 0.1), torch.optim.SGD([model.scale], 0.1)]
generator = torch.Generator().manual_seed(1)
batches = [
    (torch.randint(0, 20, (8,), generator=generator), torch.randn(8, generator=generator))
    for _ in range(arguments.steps)
]


def train(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    loss = model(ids, weights)
    if arguments.plain:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return loss


def note_step(number: int) -> None:
    path = Path("step")
    Path("step.new").write_text(f"{number} steps")
    Path("step.new").replace(path)


if not arguments.plain:
    train = rankless.job(model=model, optimizer=optimizers)(train)
for number, (ids, weights) in enumerate(batches):
    train(ids, weights)
    if not arguments.plain and rankless.rank() == 0:
        note_step(number)
        time.sleep(0.01)


def read() -> list[float]:
    with torch.no_grad():
        return [*model.table(VOCABULARY).flatten().tolist(), *model.scale.tolist()]


if arguments.plain:
    print(json.dumps(read()))
else:

    @rankless.job(model=model)
    def predict(ids):
        return torch.cat([model.table(ids).flatten(), model.scale])

    values = predict(VOCABULARY).tolist()
    rankless.once(print, json.dumps(values))

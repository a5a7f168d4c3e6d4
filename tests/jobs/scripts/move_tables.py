"""Loads tables from the latest checkpoint of a series, trains them for some steps, and saves them.

Prints the digests of all that the tables hold, after the load and after the last save, and the values of some rows.
"""

import argparse
import hashlib
import json

import torch
from torch import nn

import rankless

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, nargs="*", default=[], help="steps after which to save")
arguments = parser.parse_args()
torch.set_default_dtype(torch.float64)


class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        server = rankless.parameter_server
        self.plain = server.Embedding(16, seed=1)
        self.expiring = server.Embedding(12, seed=2, expire_after_steps=4)
        self.admitting = server.Embedding(8, seed=3, admission=server.ByCount(occurrences=2))
        self.moving = server.Embedding(4, seed=4)
        torch.manual_seed(5)
        self.layer = nn.Linear(16, 3)

    def forward(self, ids):
        terms = [table(ids).sin().sum(1) for table in (self.expiring, self.admitting, self.moving)]
        return self.layer(self.plain(ids)).square().sum(1) + sum(terms)

    def tables(self):
        return [module for module in self.modules() if isinstance(module, rankless.parameter_server.Embedding)]


model = Tables()
optimizers = [
    torch.optim.Adagrad([*model.plain.parameters(), *model.expiring.parameters()], 0.1),
    torch.optim.SparseAdam(list(model.admitting.parameters()), 0.02),
    torch.optim.SGD(model.moving.parameters(), 0.01, momentum=0.9),
    torch.optim.AdamW(model.layer.parameters(), 0.01),
]
objects = {"model": model} | {f"optimizer_{number}": each for number, each in enumerate(optimizers)}


@rankless.job(model=model, optimizer=optimizers)
def train(ids):
    return model(ids).mean()


def ids_of(step):
    """Return many ids in the first step, and few later ones, of which some are new."""
    generator = torch.Generator().manual_seed(step)
    if step == 1:
        return torch.arange(6_000) * 1_000_000_007 - 2**62
    return torch.randint(0, 6_040, (60,), generator=generator) * 1_000_000_007 - 2**62


def digest():
    found = hashlib.sha256()
    for table in model.tables():
        for key, value in sorted(table.get_extra_state().items()):
            found.update(key.encode())
            found.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else str(value).encode())
    return found.hexdigest()


checkpoints = rankless.checkpoints("series")
resumed = checkpoints.load(**objects)
loaded = digest() if resumed else None
for step in range(1 + (resumed.step if resumed else 0), 1 + max(arguments.steps, default=0)):
    train(ids_of(step))
    if step in arguments.steps:
        checkpoints.save(step, **objects)
with torch.no_grad():
    values = [table(torch.arange(0, 6_040, 301) * 1_000_000_007 - 2**62).sum().item() for table in model.tables()]
rankless.once(print, "RESULT", json.dumps({"loaded": loaded, "saved": digest(), "values": values}))

"""Trains each form of a model with tables, as jobs or, with --plain, as plain PyTorch with `nn.Embedding`.

Prints a line of JSON per form: the losses, and the values of all rows at the end.
"""

import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--plain", action="store_true")
parser.add_argument("--optimizer", default="adagrad")
parser.add_argument("--forms", default="")
parser.add_argument("--part", type=int, default=0, help="with --parts N: every N-th form, from this one on")
parser.add_argument("--parts", type=int, default=1)
parser.add_argument("--rows", type=int, default=7)
arguments = parser.parse_args()
import rankless  # noqa: E402  # the plain training uses it for the initial values of rows only

torch.set_default_dtype(torch.float64)
VOCABULARY = torch.arange(-12, 12)
DIM = 4
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9, nesterov=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.1, lr_decay=0.01),
    "sparse_adam": lambda parameters: torch.optim.SparseAdam(list(parameters), 0.02),
}


class PlainTable(nn.Module):
    """An `nn.Embedding` with the rows of a table, and its ids."""

    def __init__(self, seed: int, padding_idx: int | None) -> None:
        super().__init__()
        rows = make_table(seed, None)(VOCABULARY).detach()
        place = None if padding_idx is None else padding_idx + len(VOCABULARY) // 2
        self.rows = nn.Embedding(len(VOCABULARY), DIM, sparse=True, padding_idx=place)
        self.rows.weight.data.copy_(rows)
        if place is not None:
            self.rows.weight.data[place] = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids.long() + len(VOCABULARY) // 2)


def make_table(seed: int, padding_idx: int | None) -> nn.Module:
    return rankless.parameter_server.Embedding(DIM, seed=seed, padding_idx=padding_idx)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        make = PlainTable if arguments.plain else make_table
        self.first, self.second, self.padded = make(1, None), make(2, None), make(3, 0)
        torch.manual_seed(6)  # plain embeddings draw values that they do not need
        self.layer = rankless.parameter_server.mark_dense(nn.Linear(DIM, 3))
        self.norm = nn.BatchNorm1d(DIM)

    def predict(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows)


def classify(model, rows, labels):
    return F.cross_entropy(model.predict(rows), labels)


def select_rows(model, ids, labels):
    chosen = ids[:, 0] > -5
    return classify(model, model.first(ids[:, 0][chosen]), labels[chosen])


def no_gradient_inside(model, ids, labels):
    with torch.no_grad():
        weights = model.second(ids[:, 0]).sigmoid()
    return classify(model, model.first(ids[:, 0]) * weights, labels)


def in_batch_negatives(model, ids, _labels):
    scores = model.first(ids[:, 0]) @ model.second(ids[:, 1]).t()
    return F.cross_entropy(scores, torch.arange(len(ids)))


def checkpointed(model, ids, labels):
    def run(rows):
        return model.layer(torch.tanh(rows) + model.second(ids[:, 1]))

    return F.cross_entropy(torch.utils.checkpoint.checkpoint(run, model.first(ids[:, 0]), use_reentrant=False), labels)


FORMS = {
    "one lookup": lambda m, ids, y: classify(m, m.first(ids[:, 0]), y),
    "two features of one table": lambda m, ids, y: classify(m, m.first(ids[:, 0]) * m.first(ids[:, 1]), y),
    "two tables": lambda m, ids, y: classify(m, m.first(ids[:, 0]) + m.second(ids[:, 1]), y),
    "one lookup twice": lambda m, ids, y: classify(m, m.first(ids[:, 0]) + m.first(ids[:, 0]), y),
    "sum over positions": lambda m, ids, y: classify(m, m.first(ids).sum(1), y),
    "mean over padded positions": lambda m, ids, y: classify(m, m.padded(ids).mean(1), y),
    "ids by arithmetic": lambda m, ids, y: classify(m, m.first((ids[:, 0] * 31 + ids[:, 1]) % 11), y),
    "ids of 32 bits": lambda m, ids, y: classify(m, m.first(ids[:, 0].int()), y),
    "a constant id": lambda m, ids, y: classify(m, m.first(ids[:, 0]) + m.second(torch.tensor(3)), y),
    "all ids": lambda m, ids, y: classify(m, m.first(ids[:, 0]), y) + m.first(torch.arange(6)).square().mean(),
    "a matrix of all ids": lambda m, ids, y: F.cross_entropy(m.first(ids[:, 0]) @ m.second(torch.arange(5)).t(), y),
    "in-batch negatives": in_batch_negatives,
    "selected rows": select_rows,
    "ignored labels": lambda m, ids, y: F.cross_entropy(m.predict(m.first(ids[:, 0])), y, ignore_index=0),
    "sum of losses": lambda m, ids, y: F.cross_entropy(m.predict(m.first(ids[:, 0])), y, reduction="sum"),
    "batch norm": lambda m, ids, y: classify(m, m.norm(m.first(ids[:, 0])), y),
    "no gradient": lambda m, ids, y: classify(m, m.first(ids[:, 0]).detach() + m.second(ids[:, 1]), y),
    "read under no_grad": no_gradient_inside,
    "activation checkpoint": checkpointed,
    "transposed": lambda m, ids, y: classify(m, m.first(ids.t()).transpose(0, 1)[:, 0], y),
    "gathered ids": lambda m, ids, y: classify(m, m.first(ids[torch.arange(len(ids)).flip(0), 0]), y),
    "sorted ids": lambda m, ids, y: classify(m, m.first(ids[:, 0].sort().values), y),
    "a batch-wide sum": lambda m, ids, y: classify(m, m.first(ids[:, 0]) - m.first(ids[:, 1]).mean(0), y),
    "scaled by ids": lambda m, ids, y: classify(m, m.first(ids[:, 0]) * ids[:, 1:2], y),
    "three dims of ids": lambda m, ids, y: classify(m, m.first(ids[:, :, None].expand(-1, -1, 2)).sum((1, 2)), y),
    "where": lambda m, ids, y: classify(m, torch.where(ids[:, :1] > 0, m.first(ids[:, 0]), m.second(ids[:, 0])), y),
    "concatenated ids": lambda m, ids, y: classify(m, m.first(torch.cat([ids[:, 0], ids[:, 1]]))[: len(ids)], y),
    "no effect of a table": lambda m, ids, y: classify(m, m.first(ids[:, 0]) + 0 * m.second(ids[:, 1]), y),
    "unused rows": lambda m, ids, y: classify(m, m.first(ids)[:, 1], y),
}


def train(form: str) -> None:
    torch.manual_seed(5)
    model = Model()
    tables = [model.first, model.second, model.padded]
    parameters = [parameter for table in tables for parameter in table.parameters()]
    optimizers = [
        OPTIMIZERS[arguments.optimizer](parameters),
        torch.optim.AdamW([*model.layer.parameters(), *model.norm.parameters()], 1e-2),
    ]
    torch.manual_seed(7)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]

    def step(ids, labels):
        return FORMS[form](model, ids, labels)

    call = step if arguments.plain else rankless.job(model=model, optimizer=optimizers)(step)
    losses = []
    for count in (arguments.rows, arguments.rows, 5, 1 if form != "batch norm" else 2, arguments.rows, 4):
        ids = torch.randint(-9, 9, (count, 3))
        labels = torch.randint(0, 3, (count,))
        loss = call(ids, labels)
        if arguments.plain:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        for schedule in schedules:
            schedule.step()
        losses.append(float(loss))
    with torch.no_grad():
        rows = torch.cat([table(VOCABULARY) for table in tables])
    if rankless.rank() == 0:
        print(json.dumps({"form": form, "losses": losses, "rows": rows.flatten().tolist()}))


chosen = [name for name in FORMS if not arguments.forms or name in arguments.forms.split(",")]
for form in chosen[arguments.part :: arguments.parts]:
    try:
        train(form)
    except rankless.errors.CaptureError as error:
        if rankless.rank() == 0:
            print(json.dumps({"form": form, "refused": str(error)}))

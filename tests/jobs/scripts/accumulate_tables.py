"""Trains tables with steps of several calls, as jobs or, with --plain, with one plain step on all their rows.

Prints a line of JSON per form, with all rows at the end.
"""

import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--plain", action="store_true")
parser.add_argument("--optimizer", default="adagrad")
parser.add_argument("--tables-alone", action="store_true", help="leave out forms with other sparse embeddings")
arguments = parser.parse_args()
import rankless  # noqa: E402  # the plain training uses it for the initial values of rows only

torch.set_default_dtype(torch.float64)
VOCABULARY = torch.arange(24)
DIM = 4
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.1, lr_decay=0.01),
    "sparse_adam": lambda parameters: torch.optim.SparseAdam(list(parameters), 0.02),
}
SIZES = (6, 6, 6, 5, 1, 6, 6)
"""Rows of the calls. Steps have three calls, and the last step has one."""
CALLS = 3


class PlainTable(nn.Module):
    """An `nn.Embedding` with the rows of a table."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rows = rankless.parameter_server.Embedding(DIM, seed=seed)(VOCABULARY).detach()
        self.rows = nn.Embedding(len(VOCABULARY), DIM, sparse=True)
        self.rows.weight.data.copy_(rows)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        if arguments.plain:
            self.first, self.second = PlainTable(1), PlainTable(2)
        else:
            self.first = rankless.parameter_server.Embedding(DIM, seed=1)
            self.second = rankless.parameter_server.Embedding(DIM, seed=2)
        torch.manual_seed(6)  # plain embeddings draw values that they do not need
        self.sparse = nn.Embedding(len(VOCABULARY), DIM, sparse=True)
        self.layer = rankless.parameter_server.mark_dense(nn.Linear(DIM, 3))

    def predict(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows)


def ignored(m, ids, y):
    """One call has no valid label. Its rows belong to the step nevertheless."""
    return F.cross_entropy(m.predict(m.first(ids[:, 0])), y, ignore_index=0)


def selected(m, ids, y):
    """Some calls look nothing up."""
    chosen = ids[:, 1] > 17
    return F.cross_entropy(m.predict(m.first(ids[:, 0][chosen])), y[chosen])


FORMS = {
    "one lookup": lambda m, ids, y: F.cross_entropy(m.predict(m.first(ids[:, 0])), y),
    "two tables": lambda m, ids, y: F.cross_entropy(m.predict(m.first(ids[:, 0]) * m.second(ids[:, 1])), y),
    "one table twice": lambda m, ids, y: F.cross_entropy(m.predict(m.first(ids[:, 0]) - m.first(ids[:, 1])), y),
    "ignored labels": ignored,
    "sum of losses": lambda m, ids, y: F.cross_entropy(m.predict(m.first(ids[:, 0])), y, reduction="sum"),
    "class weights": lambda m, ids, y: F.cross_entropy(m.predict(m.first(ids[:, 0])), y, torch.tensor([0.2, 1, 3])),
    "beside a sparse embedding": lambda m, ids, y: F.cross_entropy(
        m.predict(m.first(ids[:, 0]) + m.sparse(ids[:, 1])), y
    ),
    "a sparse embedding with ignored labels": lambda m, ids, y: F.cross_entropy(
        m.predict(m.sparse(ids[:, 1])), y, ignore_index=0
    ),
    "selected rows": selected,
    "a sum over positions": lambda m, ids, y: F.mse_loss(m.predict(m.first(ids).sum(1)).sum(1), y.double()),
}
if arguments.tables_alone:
    FORMS = {form: compute for form, compute in FORMS.items() if "sparse embedding" not in form}


def batches(form: str):
    generator = torch.Generator().manual_seed(len(form))
    for number, size in enumerate(SIZES):
        ids = torch.randint(0, 24, (size, 2), generator=generator)
        labels = torch.randint(0, 3, (size,), generator=generator)
        if "ignored labels" in form and number in (0, 3, 4):
            ids = torch.arange(2 * size).reshape(size, 2) % 24  # rows that have states from the second step on
            labels = torch.zeros_like(labels)
        yield ids, labels


def make(form: str):
    model = Model()
    tables = [*model.first.parameters(), *model.second.parameters(), model.sparse.weight]
    if "sparse embedding" not in form:
        tables.pop()
    optimizers = [OPTIMIZERS[arguments.optimizer](tables), torch.optim.AdamW(model.layer.parameters(), 1e-2)]
    return model, optimizers


def show(form: str, model) -> None:
    with torch.no_grad():
        rows = [model.first(VOCABULARY), model.second(VOCABULARY), model.sparse.weight, model.layer.weight]
    print(json.dumps({"form": form, "rows": torch.cat([each.flatten() for each in rows]).tolist()}))


for form, compute in FORMS.items():
    model, optimizers = make(form)
    if arguments.plain:
        given = list(batches(form))
        for start in range(0, len(given), CALLS):
            ids, labels = (torch.cat(part) for part in zip(*given[start : start + CALLS], strict=True))
            for optimizer in optimizers:
                optimizer.zero_grad()
            compute(model, ids, labels).backward()
            for optimizer in optimizers:
                optimizer.step()
        show(form, model)
        continue

    @rankless.job(model=model, optimizer=optimizers, accumulate=CALLS)
    def train(ids, labels, compute=compute, model=model):
        return compute(model, ids, labels)

    steps = 0
    for ids, labels in batches(form):
        for optimizer in optimizers:
            optimizer.zero_grad()  # as loops have it; the job keeps what it has accumulated
        train(ids, labels)
        steps += train.stepped
    steps += train.flush()
    assert steps == 3
    show(form, model)

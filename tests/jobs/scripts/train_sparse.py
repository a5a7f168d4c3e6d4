"""Trains each form of a model with sparse embeddings, as jobs or, with --plain, as plain PyTorch.

Prints a line of JSON per form: the losses, the gradients of the last step, and the final rows and optimizer states.
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
arguments = parser.parse_args()
if not arguments.plain or arguments.optimizer == "ftrl":
    import rankless

torch.set_default_dtype(torch.float64)
ROWS, DIM = 23, 4
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9, dampening=0.1),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9, nesterov=True, maximize=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.1, lr_decay=0.01, initial_accumulator_value=0.2),
    "sparse_adam": lambda parameters: torch.optim.SparseAdam(parameters, 0.02),
    "ftrl": lambda parameters: rankless.parameter_server.FTRL(parameters, 0.1, l1=0.001, l2=0.01, beta=0.5),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(ROWS, DIM, sparse=True)
        self.padded = nn.Embedding(ROWS, DIM, sparse=True, padding_idx=-3)
        self.sum = nn.EmbeddingBag(ROWS, DIM, sparse=True, mode="sum")
        self.mean = nn.EmbeddingBag(ROWS, DIM, sparse=True, padding_idx=2)
        self.last = nn.EmbeddingBag(ROWS, DIM, sparse=True, mode="sum", include_last_offset=True)
        self.layer = nn.Linear(DIM, 3)
        self.weighting = nn.Parameter(torch.randn(ROWS))

    @property
    def embeddings(self) -> list[nn.Module]:
        return [self.first, self.padded, self.sum, self.mean, self.last]


def classify(model, rows, labels):
    return F.cross_entropy(model.layer(rows), labels)


def offsets_of(ids):
    """Return offsets of as many bags as there are samples: the second one is empty."""
    places = torch.arange(ids.shape[0]) * 3
    return places - (torch.arange(ids.shape[0]) == 2) * 3


def with_offsets(model, ids, labels):
    return classify(model, model.sum(ids.flatten(), offsets_of(ids)), labels)


def with_last_offset(model, ids, labels):
    offsets = torch.cat([offsets_of(ids), torch.tensor([ids.numel()])])
    return classify(model, model.last(ids.flatten(), offsets), labels)


def weighted_with_offsets(model, ids, labels):
    flat = ids.flatten()
    return classify(model, model.sum(flat, offsets_of(ids), model.weighting[flat]), labels)


def selected(model, ids, labels):
    chosen = ids[:, 0] > 6
    rows = model.first(ids[:, 0][chosen])  # in one call there is none
    return F.cross_entropy(model.layer(rows), labels[chosen], reduction="sum")


def functional_bag(model, ids, labels):
    return classify(model, F.embedding_bag(ids, model.sum.weight, mode="mean", sparse=True, padding_idx=4), labels)


def read_without_gradient(model, ids, labels):
    with torch.no_grad():
        weights = model.sum(ids).sigmoid()
    return classify(model, model.first(ids[:, 0]) * weights, labels)


FORMS = {
    "one lookup": lambda m, ids, y: classify(m, m.first(ids[:, 0]), y),
    "two lookups": lambda m, ids, y: classify(m, m.first(ids[:, 0]) * m.first(ids[:, 1]), y),
    "ids of 32 bits": lambda m, ids, y: classify(m, m.first(ids[:, 0].int()), y),
    "padding": lambda m, ids, y: classify(m, m.padded(ids).sum(1), y),
    "three dims of ids": lambda m, ids, y: classify(m, m.first(ids[:, :, None].expand(-1, -1, 2)).sum((1, 2)), y),
    "one constant id": lambda m, ids, y: classify(m, m.first(ids[:, 0]) + m.padded(torch.tensor([3])), y),
    "a matrix of all ids": lambda m, ids, y: F.cross_entropy(m.first(ids[:, 0]) @ m.padded(torch.arange(5)).t(), y),
    "bags": lambda m, ids, y: classify(m, m.sum(ids), y),
    "bags of 32 bits": lambda m, ids, y: classify(m, m.sum(ids.int()), y),
    "means of bags with padding": lambda m, ids, y: classify(m, m.mean(ids), y),
    "weighted bags": lambda m, ids, y: classify(m, m.sum(ids, per_sample_weights=m.weighting[ids]), y),
    "offsets": with_offsets,
    "means with offsets": lambda m, ids, y: classify(m, m.mean(ids.flatten(), offsets_of(ids)), y),
    "the last offset": with_last_offset,
    "weights with offsets": weighted_with_offsets,
    "functional lookup": lambda m, ids, y: classify(m, F.embedding(ids[:, 0], m.first.weight, sparse=True), y),
    "functional bag": functional_bag,
    "selected rows": selected,
    "read under no_grad": read_without_gradient,
    "all of them": lambda m, ids, y: classify(
        m, m.first(ids[:, 0]) + m.padded(ids).mean(1) + m.sum(ids) + m.mean(ids), y
    ),
    "in-batch negatives": lambda m, ids, _: F.cross_entropy(
        m.first(ids[:, 0]) @ m.padded(ids[:, 1]).t(), torch.arange(ids.shape[0])
    ),
    "sum of losses": lambda m, ids, y: F.cross_entropy(m.layer(m.first(ids[:, 0])), y, reduction="sum"),
    "ignored labels": lambda m, ids, y: F.cross_entropy(m.layer(m.first(ids[:, 0])), y, ignore_index=0),
}


def list_states(optimizer) -> list[float]:
    values = [
        value.to_dense() if isinstance(value, torch.Tensor) and value.layout == torch.sparse_coo else value
        for state in optimizer.state_dict()["state"].values()
        for _, value in sorted(state.items())
    ]
    return [number for value in values for number in torch.as_tensor(value).double().flatten().tolist()]


def train(form: str) -> None:
    torch.manual_seed(5)
    model = Model()
    weights = [embedding.weight for embedding in model.embeddings]
    groups = [{"params": weights[:2]}, {"params": weights[2:], "lr": 0.03}]
    optimizers = [
        OPTIMIZERS[arguments.optimizer](groups),
        torch.optim.AdamW([*model.layer.parameters(), model.weighting], 1e-2),
    ]
    torch.manual_seed(7)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]

    def step(ids, labels):
        return FORMS[form](model, ids, labels)

    call = step if arguments.plain else rankless.job(model=model, optimizer=optimizers)(step)
    losses = []
    for count in (7, 7, 5, 1, 7, 4):
        ids, labels = torch.randint(0, ROWS, (count, 3)), torch.randint(0, 3, (count,))
        loss = call(ids, labels)
        if arguments.plain:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        for schedule in schedules:
            schedule.step()
        losses.append(loss.item())
    gradients = [weight.grad for weight in weights]
    assert all(gradient is None or gradient.is_sparse for gradient in gradients)
    found = {
        "losses": losses,
        "entries": [-1.0 if gradient is None else float(gradient._nnz()) for gradient in gradients],
        "gradients": [
            number for each in gradients if each is not None for number in each.to_dense().flatten().tolist()
        ],
        "rows": torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist(),
        "states": [number for optimizer in optimizers for number in list_states(optimizer)],
    }
    if arguments.plain or rankless.rank() == 0:
        print(json.dumps({"form": form, **found}))


chosen = [name for name in FORMS if not arguments.forms or name in arguments.forms.split(",")]
for form in chosen[arguments.part :: arguments.parts]:
    train(form)

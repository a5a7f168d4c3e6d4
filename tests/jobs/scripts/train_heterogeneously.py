"""Trains one case of a model whose dense part is marked, as a job, and prints its numbers as a line of JSON."""

import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn

import rankless

mark_dense = rankless.parameter_server.mark_dense
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
drawn = torch.Generator(torch.get_default_device()).manual_seed(3)
IDS = torch.randint(0, 50, (120, 2), generator=drawn)
NUMBERS = torch.randn(120, 6, generator=drawn)
TARGETS = torch.randn(120, generator=drawn)
LABELS = torch.randint(0, 3, (120,), generator=drawn)


class Model(nn.Module):
    """A table, a layer of numbers before the dense part, and the dense part."""

    def __init__(self, outputs=1):
        super().__init__()
        self.table = rankless.parameter_server.Embedding(5, initial=rankless.parameter_server.Normal(std=0.3), seed=1)
        self.numbers = nn.Linear(6, 6)
        self.layers = mark_dense(
            nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, outputs))
        )

    def look_up(self, ids, numbers):
        return torch.cat([self.table(ids).flatten(1), self.numbers(numbers)], 1)

    def forward(self, ids, numbers):
        return self.layers(self.look_up(ids, numbers)).squeeze(1)


def make_optimizers(model):
    dense = [item for name, item in model.named_parameters() if not name.startswith("table")]
    return [torch.optim.Adagrad(model.table.parameters(), lr=0.1), torch.optim.AdamW(dense, lr=0.01)]


def mean_error(model, ids, numbers, targets, _labels):
    return F.mse_loss(model(ids, numbers), targets)


def read_loss(model, ids, numbers, targets, _labels):
    loss = F.mse_loss(model(ids, numbers), targets)
    return loss * 2 if loss.item() > 1.5 else loss


def look_up_later(model, ids, numbers, targets, _labels):
    scores = model(ids, numbers)
    return F.mse_loss(scores + model.table(ids.sum(1)).sum(1), targets)


def look_up_all(model, ids, numbers, targets, _labels):
    return F.mse_loss(model(ids, numbers), targets) + model.table(torch.arange(6)).square().mean()


def ignore_some(model, ids, numbers, _targets, labels):
    return F.cross_entropy(model.layers(model.look_up(ids, numbers)), labels, ignore_index=1)


def return_scores(model, ids, numbers, targets, _labels):
    scores = model(ids, numbers)
    return F.mse_loss(scores, targets), scores, (scores > 0).sum()


def look_up_by_score(model, ids, numbers, targets, _labels):
    scores = model(ids, numbers)
    return F.mse_loss(scores + model.table((scores.detach().abs() * 3).long()).sum(1), targets)


def normalize(model, ids, numbers, targets, _labels):
    return F.mse_loss(
        F.batch_norm(model.look_up(ids, numbers), None, None, training=True).sum(1), targets
    ) + F.mse_loss(model(ids, numbers), targets)


CASES = {
    function.__name__: function
    for function in (
        mean_error,
        read_loss,
        look_up_later,
        look_up_all,
        ignore_some,
        return_scores,
        look_up_by_score,
        normalize,
    )
}
parser = argparse.ArgumentParser()
parser.add_argument("case", choices=CASES)
parser.add_argument("--rows", type=int, default=20)
parser.add_argument("--unmarked", action="store_true")
arguments = parser.parse_args()
case, rows = CASES[arguments.case], arguments.rows
model = Model(outputs=3 if case is ignore_some else 1)
if arguments.unmarked:
    model.layers = nn.Sequential(*model.layers)
optimizers = make_optimizers(model)
schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8) for optimizer in optimizers]


@rankless.job(model=model, optimizer=optimizers)
def train(ids, numbers, targets, labels):
    return case(model, ids, numbers, targets, labels)


@rankless.job(model=model)
def predict(ids, numbers):
    return model.look_up(ids, numbers) if case is ignore_some else model(ids, numbers)


numbers = []
for step in range(6):
    if step == 3:
        with torch.no_grad():
            model.layers[0].weight.mul_(0.9)
    part = slice(step * rows % 120, step * rows % 120 + rows)
    result = train(IDS[part], NUMBERS[part], TARGETS[part], LABELS[part])
    for value in result if isinstance(result, tuple) else (result,):
        numbers += (value * torch.arange(1, 1 + value.numel())).flatten().tolist()
    for schedule in schedules:
        schedule.step()
model.eval()
numbers += predict(IDS, NUMBERS).flatten().tolist()
numbers += [float(item.detach().sum()) for name, item in model.named_parameters() if name != "table.weight"]
numbers += model.table.list_rows()["rows"].flatten().tolist()
print(json.dumps(numbers))

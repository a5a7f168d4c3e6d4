"""Scripts that would notice if the memory of parameters, which workers share, were read or written at a wrong time.

Each function receives `make`, which makes a job in this process's world, and returns tensors. The same code runs on
one device and on several workers, and must return the same.
"""

import pytest
import torch
import torch.nn.functional as F
from support.trainings import adamw, batches, list_cases, make_model, sgd, show, train_classifier
from torch import nn

from rankless.errors import StepError


def copies(values):
    return [value.detach().clone() for value in values]


def list_views(model):
    """Return a parameter and views of parameters, with gaps and with repeated elements."""
    first, last = model[0].weight, model[5].weight
    shown = first, first.t(), last[1:3, ::2], last.view(-1), model[0].bias.expand(2, 9), first[3]
    return [item.detach() for item in shown]


def results_that_are_parameters(make):
    model = make_model()
    optimizer = sgd(model)
    train = make(lambda x, y: (F.cross_entropy(model(x), y), *list_views(model)), model, optimizer)
    kept = []
    for batch in batches():
        _, *results = train(*batch)
        kept += [*results, *copies(results)]
    return [*copies(kept), *show(model, optimizer)]


def results_of_a_forward_job_that_are_parameters(make):
    model = make_model()
    optimizer = adamw(model)
    train = make(lambda x, y: F.cross_entropy(model(x), y), model, optimizer)
    read = make(lambda: {name: item.detach() for name, item in model.named_parameters()}, model, None)
    found, kept, known = [], [], []
    for batch in batches():
        found.append(train(*batch))
        kept += read().values()
        known += copies(read().values())
    return [*found, *known, *copies(kept), *show(model, optimizer)]


def results_that_the_script_overwrites(make):
    model = make_model()
    optimizer = adamw(model)
    train = make(lambda x, y: (F.cross_entropy(model(x), y), model[0].weight.detach()), model, optimizer)
    found = []
    for batch in batches():
        loss, weight = train(*batch)
        found.append(loss)
        weight.mul_(1.25)
    return [*found, *show(model, optimizer)]


def parameters_exchanged_in_the_job(make):
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 4))
    optimizer = sgd(model)

    def loss(x, y):
        with torch.no_grad():
            kept = model[0].weight.clone()
            model[0].weight.copy_(model[2].weight)
            model[2].weight.copy_(kept)
            model[0].bias.copy_(model[2].bias)
        return F.cross_entropy(model(x), y)

    return [*train_with(make, loss, model, optimizer), *show(model, optimizer)]


def train_with(make, loss, model, optimizer, **options):
    train = make(loss, model, optimizer, **options)
    return [train(*batch) for batch in batches()]


def rows_written_in_the_job(make):
    model = make_model()
    optimizer = adamw(model)

    def loss(x, y):
        with torch.no_grad():
            model[0].weight[2].zero_()
            model[3].weight.view(-1)[7:9].add_(0.25)
            model[5].bias.mul_(0.9)
        return F.cross_entropy(model(x), y)

    return [*train_with(make, loss, model, optimizer), *show(model, optimizer)]


def written_by_a_forward_job(make):
    model = make_model()
    optimizer = sgd(model)

    def shrink():
        with torch.no_grad():
            for item in model.parameters():
                item.mul_(0.75)
        return model[0].weight.detach().sum()

    shrinking = make(shrink, model, None)
    return train_classifier(make, model, optimizer, shrinking)


def two_jobs_with_optimizers_of_one_model(make):
    model = make_model()
    head, body = sgd(model[5]), torch.optim.AdamW([*model[0].parameters(), *model[3].parameters()], lr=1e-2)
    first = make(lambda x, y: F.cross_entropy(model(x), y), model, head)
    second = make(lambda x, y: model(x).square().mean() + y.sum() * 0, model, body)
    found = []
    for batch in batches():
        found += [first(*batch), second(*batch), first(*batch)]
    return [*found, *show(model, head, body)]


def two_optimizers_of_one_parameter(make):
    model = make_model()
    optimizers = sgd(model), adamw(model)
    jobs = [make(lambda x, y: F.cross_entropy(model(x), y), model, item) for item in optimizers]
    found = [job(*batch) for batch in batches() for job in jobs]
    return [*found, *show(model, *optimizers)]


def evaluated_between_accumulated_calls(make):
    model = make_model()
    optimizer = adamw(model)
    train = make(lambda x, y: F.cross_entropy(model(x), y), model, optimizer, accumulate=3)
    predict = make(lambda x: model(x), model, None)
    found = []
    for number, (inputs, labels) in enumerate(batches(8)):
        found += [train(inputs, labels), predict(inputs)]
        if number == 6:
            train.flush()
            found.append(predict(inputs))
    return [*found, *show(model, optimizer)]


def divided_before_the_first_call(make):
    model = make_model()
    optimizer = adamw(model)
    train = make(lambda x, y: F.cross_entropy(model(x), y), model, optimizer)
    train.divide_states()
    with torch.inference_mode():
        found = copies(model.parameters())
    found += [train(*batch) for batch in batches()]
    return [*found, *show(model, optimizer)]


def read_by_a_job_before_they_are_divided(make):
    model = make_model()
    optimizer = adamw(model)
    predict = make(lambda x: model(x), model, None)
    inputs = torch.linspace(-1, 1, 24).view(4, 6)
    with torch.inference_mode():
        first = predict(inputs).clone()
    return [first, *train_classifier(make, model, optimizer, lambda: predict(inputs)), predict(inputs)]


def refused_step(make):
    model = make_model()
    optimizer = adamw(model)
    train = make(lambda x, y: F.cross_entropy(model(x), y), model, optimizer, check_finite=True)
    found = []
    for number, (inputs, labels) in enumerate(batches()):
        if number == 2:
            with pytest.raises(StepError):
                train(inputs * float("nan"), labels)
        found.append(train(inputs, labels))
    return [*found, *show(model, optimizer)]


def changed_by_the_script_after_a_forward_job(make):
    model = make_model()
    predict = make(lambda x: model(x), model, None)
    inputs = torch.linspace(-1, 1, 24).view(4, 6)

    def change():
        before = predict(inputs)
        with torch.no_grad():
            model[0].weight.mul_(0.5)
        return torch.stack([before, predict(inputs)])

    return train_classifier(make, model, adamw(model), change)


class Mixed(nn.Module):
    """Parameters in every layout: some can lie in one memory, others cannot."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Parameter(torch.randn(3, 64) / 8)  # divided along its columns
        self.back = nn.Parameter((torch.randn(64, 6) / 8).t())  # its columns lie together
        self.flat = nn.Parameter(torch.randn(1, 6, 1) / 8)
        self.empty = nn.Parameter(torch.empty(8, 0))
        self.scalar = nn.Parameter(torch.ones(()))
        self.conv = nn.Conv2d(2, 6, 3, padding=1).to(memory_format=torch.channels_last)
        self.phase = nn.Parameter(torch.randn(6, dtype=torch.complex128) / 8)
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x):
        hidden = (x[:, :3] @ self.wide) @ self.back.t()
        hidden = hidden + self.flat[0, :, 0] + self.empty.sum()
        image = self.norm(self.conv(hidden.view(-1, 2, 3, 1))).mean((2, 3))
        return (image * self.phase).abs()[:, :4] * self.scalar


def every_layout(make):
    model = Mixed()
    found = train_classifier(make, model, sgd(model))
    return [value for value in found if value.numel()]


def layouts_of_whole_matrices(make):
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
    model[0].weight.data = model[0].weight.data.t().contiguous().t()
    return train_classifier(make, model, torch.optim.Adafactor(model.parameters(), lr=0.05))


def gradients_that_are_parameters(make):
    first, second = nn.Linear(4, 8, bias=False), nn.Linear(4, 8, bias=False)
    model = nn.ModuleList([first, second])
    optimizer = sgd(model)

    def loss(x, y):
        return (first.weight * second.weight).sum() + x.sum() * 0 + y.sum() * 0

    found = train_with(make, loss, model, optimizer)
    return [*found, *show(model, optimizer)]


def frozen_parameters_of_the_optimizer(make):
    model = make_model()
    model[3].weight.requires_grad_(False)
    optimizer = adamw(model)
    train = make(lambda x, y: F.cross_entropy(model(x), y), model, optimizer)
    found = []
    for number, batch in enumerate(batches(6)):
        if number == 3:
            model[3].weight.requires_grad_(True)
            model[0].weight.requires_grad_(False)
        found.append(train(*batch))
    return [*found, *show(model, optimizer)]


def cast_in_both_passes(make):
    model = make_model()
    optimizer = sgd(model)

    def loss(x, y):
        weights = [model[index].weight.float() for index in (0, 3, 5)]
        hidden = x.float()
        for weight in weights:
            hidden = torch.tanh(hidden @ weight.t())
        return F.cross_entropy(model(x) + 1e-3 * hidden.double(), y)

    # In float32 sums over rows round in their order, so only what does not depend on it is compared exactly.
    return [value.mul(2**20).round() / 2**20 for value in train_with(make, loss, model, optimizer)]


def parameters_and_state_cleared_by_the_script(make):
    model = make_model()
    optimizer = adamw(model)

    def clear():
        optimizer.state.clear()
        with torch.no_grad():
            for item in model.parameters():
                item.zero_()
                item.add_(0.1)

    return train_classifier(make, model, optimizer, clear)


def a_row_looked_up_in_a_divided_embedding(make):
    table = nn.Embedding(11, 4)
    model = nn.ModuleList([table, nn.Linear(4, 4)])
    optimizer = adamw(model)

    def loss(x, y):
        return F.cross_entropy(model[1](table(y) + table(10 - y)), y) + x.sum() * 0

    return [*train_with(make, loss, model, optimizer), *show(model, optimizer)]


SHARED_CASES = list_cases(globals())

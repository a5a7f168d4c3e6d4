"""What scripts do with steps of several calls and tables. Prints a line of JSON per case, with all rows at the end."""

import json

import torch
import torch.nn.functional as F
from torch import nn

import rankless
from rankless.errors import StepError

torch.set_default_dtype(torch.float64)
VOCABULARY = torch.arange(30)
ByCount = rankless.parameter_server.ByCount


def show(case, *tensors):
    print(json.dumps({"form": case, "rows": torch.cat([each.detach().flatten() for each in tensors]).tolist()}))


def make(layers=1, **options):
    """Return a table and linear layers."""
    model = nn.ModuleList([rankless.parameter_server.Embedding(3, seed=4, **options)])
    model.extend([nn.Linear(3, 1) for _ in range(layers)])
    for layer in model[1:]:
        nn.init.constant_(layer.weight, 0.3)
        nn.init.zeros_(layer.bias)
    return model


def rows_of(model):
    with torch.no_grad():
        return model[0](VOCABULARY)


def loader_with_short_last_groups():
    torch.manual_seed(1)
    model = make()
    optimizers = [torch.optim.Adagrad(model[0].parameters(), 0.1), torch.optim.SGD(model[1].parameters(), 0.1)]
    data = torch.utils.data.TensorDataset(torch.randint(0, 30, (41, 2)), torch.randn(41))
    loader = rankless.loader(data, batch_size=6, shuffle=True)

    @rankless.job(model=model, optimizer=optimizers, accumulate=4)
    def train(ids, targets):
        return F.mse_loss(model[1](model[0](ids).sum(1)).squeeze(1), targets)

    steps = 0
    for _ in range(3):
        for ids, targets in loader:
            train(ids, targets)
            steps += train.stepped
    show("loader", rows_of(model), model[1].weight, torch.tensor(float(steps)))


def admission(accumulate):
    """Occurrences of all calls of a step count, so both give the same rows."""
    model = make(admission=ByCount(occurrences=3))
    optimizers = [torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.SGD(model[1].parameters(), 0.1)]

    @rankless.job(model=model, optimizer=optimizers, accumulate=accumulate)
    def train(ids):
        return model[1](model[0](ids)).square().mean()

    generator = torch.Generator().manual_seed(3)
    batches = [torch.randint(0, 30, (6,), generator=generator) for _ in range(12)]
    if accumulate == 1:
        batches = [torch.cat(batches[first : first + 3]) for first in range(0, 12, 3)]
    for batch in batches:
        train(batch)
    found = model[0].statistics()
    numbers = torch.tensor([float(found.rows), float(found.created)])
    show(f"admission, accumulate={accumulate}", rows_of(model), model[1].weight, numbers)


def losses_that_are_not_finite():
    model = make()
    optimizers = [torch.optim.Adagrad(model[0].parameters(), 0.1), torch.optim.SGD(model[1].parameters(), 0.1)]

    @rankless.job(model=model, optimizer=optimizers, accumulate=2, check_finite=True)
    def train(ids, targets):
        return F.mse_loss(model[1](model[0](ids)).squeeze(1), targets)

    refused = 0
    for number in range(6):
        targets = torch.ones(4)
        if number in (1, 4):
            targets[0] = float("inf")
        try:
            train(torch.arange(4) + number, targets)
        except StepError:
            refused += 1
    train.flush()
    show("not finite", rows_of(model), model[1].weight, torch.tensor(float(refused)))


def two_jobs_with_one_table():
    model = make(layers=2)
    rows = torch.optim.SGD(model[0].parameters(), 0.1)
    layers = [torch.optim.SGD(layer.parameters(), 0.1) for layer in model[1:]]

    @rankless.job(model=model, optimizer=[rows, layers[0]], accumulate=2)
    def first(ids):
        return model[1](model[0](ids)).square().mean()

    @rankless.job(model=model, optimizer=[rows, layers[1]], accumulate=3)
    def second(ids):
        return (model[2](model[0](ids)) - 1).square().mean()

    for number in range(12):
        (first if number % 2 else second)((torch.arange(5) * (number + 1)) % 30)
    show("two jobs", rows_of(model), model[1].weight, model[2].weight)


def scaled_before_flush():
    model = make()
    optimizer = torch.optim.SGD([*model.parameters()], 0.1)

    @rankless.job(model=model, optimizer=optimizer, accumulate=3)
    def train(ids):
        return model[1](model[0](ids)).square().mean()

    train(torch.arange(4))
    train(torch.arange(4) + 2)
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 0.5
    train.flush()
    show("scaled", rows_of(model), model[1].weight)


def loaded_between_calls():
    model = make()
    optimizer = torch.optim.Adagrad([*model.parameters()], 0.1)

    @rankless.job(model=model, optimizer=optimizer, accumulate=2)
    def train(ids):
        return model[1](model[0](ids)).square().mean()

    for number in range(5):
        train(torch.arange(4) + number)
    saved = {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in model.state_dict().items()
    }
    train(torch.arange(4) + 5)
    model.load_state_dict(saved)
    for number in range(4):
        train(torch.arange(4) + number)
    show("loaded", rows_of(model), model[1].weight)


loader_with_short_last_groups()
admission(1)
admission(3)
losses_that_are_not_finite()
two_jobs_with_one_table()
scaled_before_flush()
loaded_between_calls()

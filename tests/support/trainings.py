"""Trainings as people write them, for comparisons of several workers with one device.

Each function receives `make`, which makes a job in this process's world, and returns tensors. The same code runs on
one device and on several workers, and must return the same.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

CLASSES = 4


def batches(count=5, rows=8, features=6):
    generator = torch.Generator(torch.get_default_device()).manual_seed(9)
    for number in range(count):
        size = rows - number % 2
        inputs = torch.randn(size, features, generator=generator)
        yield inputs, torch.randint(0, CLASSES, (size,), generator=generator)


def make_model():
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def train_classifier(make, model, optimizer, after=lambda: None, count=5, **options):
    """Train and return losses, parameters and optimizer state."""
    train = make(lambda x, y: F.cross_entropy(model(x), y), model, optimizer, **options)
    found = []
    for inputs, labels in batches(count):
        found.append(train(inputs, labels))
        extra = after()
        if extra is not None:
            found.append(extra)
    return [*found, *show(model, optimizer)]


def show(model, *optimizers):
    values = [item.detach().clone() for item in model.state_dict().values()]
    for optimizer in optimizers:
        for parameter in (item for group in optimizer.param_groups for item in group["params"]):
            entries = optimizer.state.get(parameter, {})
            values += [entries[key].detach().clone() for key in sorted(entries)]
    return values


def adamw(model, **settings):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **settings)


def sgd(model, **settings):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **settings)


def plain_adamw(make):
    model = make_model()
    return train_classifier(make, model, adamw(model))


def fused_channels_last(make):
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 5, 3),
        nn.Flatten(),
        nn.Linear(20, CLASSES),
    ).to(memory_format=torch.channels_last)
    optimizer = adamw(model, fused=True)
    train = make(lambda x, y: F.cross_entropy(model(x), y), model, optimizer)
    found = []
    for number in range(4):
        inputs = torch.randn(4, 3, 6, 6).to(memory_format=torch.channels_last)
        found.append(train(inputs, torch.arange(4) % CLASSES))
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last), number
    return [*found, *show(model, optimizer)]


def for_loops_and_amsgrad(make):
    model = make_model()
    return train_classifier(make, model, adamw(model, foreach=False, amsgrad=True, maximize=True))


def adagrad_with_state_from_the_start(make):
    model = make_model()
    return train_classifier(make, model, torch.optim.Adagrad(model.parameters(), lr=0.1, lr_decay=0.1))


def adafactor(make):
    model = make_model()
    return train_classifier(make, model, torch.optim.Adafactor(model.parameters(), lr=0.1), clip_norm=0.5)


def muon_and_adamw(make):
    model = make_model()
    matrices = [item for item in model.parameters() if item.dim() == 2]
    others = [item for item in model.parameters() if item.dim() != 2]
    optimizers = [torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(others, lr=1e-2)]
    train = make(lambda x, y: F.cross_entropy(model(x), y), model, optimizers, accumulate=2, check_finite=True)
    found = [train(*batch) for batch in batches()]
    train.flush()
    return [*found, *show(model, *optimizers)]


def learning_rate_as_tensor(make):
    model = make_model()
    return train_classifier(make, model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2)))


def schedule_and_groups(make):
    model = make_model()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.05}, {"params": model[2:].parameters(), "weight_decay": 0.1}],
        lr=0.1,
        momentum=0.9,
        nesterov=True,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    return train_classifier(make, model, optimizer, scheduler.step)


def group_added_later(make):
    model = make_model()
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=1e-2)
    train = make(lambda x, y: F.cross_entropy(model(x), y), model, optimizer)
    found = []
    for number, (inputs, labels) in enumerate(batches()):
        if number == 2:
            optimizer.add_param_group({"params": list(model[3:].parameters()), "lr": 0.1})
        found.append(train(inputs, labels))
    return [*found, *show(model, optimizer)]


def clipped_by_norm(make):
    model = make_model()
    return train_classifier(make, model, adamw(model), clip_norm=0.05, check_finite=True)


def clipped_by_value(make):
    model = make_model()
    return train_classifier(make, model, sgd(model), clip_value=0.01)


def measured_norm(make):
    model = make_model()
    optimizer = sgd(model)
    train = make(lambda x, y: F.cross_entropy(model(x), y), model, optimizer, gradient_norm=True)
    found = []
    for inputs, labels in batches():
        train(inputs, labels)
        found.append(train.gradient_norm)
    return found


def accumulated_calls(make):
    model = make_model()
    optimizer = adamw(model)
    train = make(lambda x, y: F.cross_entropy(model(x), y), model, optimizer, accumulate=2, clip_norm=0.1)
    found = [train(*batch) for batch in batches()]
    train.flush()
    return [*found, *show(model, optimizer)]


def tied_weights(make):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(11, 6)
            self.inner = nn.Linear(6, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, ids):
            return self.head(torch.tanh(self.inner(self.tokens(ids))))

    model = Tied()
    optimizer = adamw(model)
    train = make(lambda ids: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()), model, optimizer)
    found = [train(torch.randint(0, 11, (5, 7))) for _ in range(4)]
    assert model.head.weight is model.tokens.weight
    return [*found, *show(model, optimizer)]


def frozen_and_unused(make):
    model = make_model()
    model[0].weight.requires_grad_(False)
    model.spare = nn.Linear(4, 4)
    used = nn.Sequential(*list(model)[:-1])
    optimizer = adamw(model)
    train = make(lambda x, y: F.cross_entropy(used(x), y), model, optimizer)
    return [*[train(*batch) for batch in batches()], *show(model, optimizer)]


def frozen_later(make):
    model = make_model()
    optimizer = sgd(model)

    def freeze_and_unfreeze():
        model[3].weight.requires_grad_(not model[3].weight.requires_grad)

    return train_classifier(make, model, optimizer, freeze_and_unfreeze)


def recurrent(make):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LSTM(6, 5, batch_first=True, bidirectional=True)
            self.head = nn.Linear(10, CLASSES)

        def forward(self, x):
            return self.head(self.layer(x)[0])

    model = Tagger()
    optimizer = adamw(model)
    train = make(lambda x: model(x).square().mean(), model, optimizer)
    return [*[train(torch.randn(4, length, 6)) for length in (3, 5, 3, 4)], *show(model, optimizer)]


def lengths_vary(make):
    model = make_model()
    optimizer = adamw(model)
    train = make(lambda x: model(x).square().mean(), model, optimizer)
    return [*[train(torch.randn(4, length, 6)) for length in (3, 5, 2, 4, 6)], *show(model, optimizer)]


def attention_with_dropout(make):
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    optimizer = sgd(model)
    train = make(lambda x: model(x).square().mean(), model, optimizer)
    return [*[train(torch.randn(5, 3, 8)) for _ in range(4)], *show(model, optimizer)]


def gradient_penalty(make):
    model = make_model()
    optimizer = sgd(model)

    def penalty(x):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return slope.square().mean()

    train = make(penalty, model, optimizer)
    return [*[train(inputs) for inputs, _ in batches()], *show(model, optimizer)]


def average_in_the_job(make):
    model = make_model()
    average = copy.deepcopy(model)
    optimizer = sgd(model)

    def loss(x, y):
        with torch.no_grad():
            for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                kept.mul_(0.9).add_(new, alpha=0.1)
        return F.cross_entropy(model(x), y) + 0.1 * F.cross_entropy(average(x), y)

    train = make(loss, [model, average], optimizer)
    return [*[train(*batch) for batch in batches()], *show(model, optimizer), *show(average)]


def weights_clipped_in_the_job(make):
    model = make_model()
    optimizer = sgd(model)

    def loss(x, y):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)
        return F.cross_entropy(model(x), y)

    train = make(loss, model, optimizer)
    return [*[train(*batch) for batch in batches()], *show(model, optimizer)]


def two_networks_with_two_jobs(make):
    generator, critic = nn.Linear(3, 6), nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))
    optimizers = [adamw(generator), sgd(critic)]
    judge = make(
        lambda x, z: critic(generator(z).detach()).mean() - critic(x).mean(), [generator, critic], optimizers[1]
    )
    forge = make(lambda z: -critic(generator(z)).mean(), [generator, critic], optimizers[0])
    found = []
    for inputs, _ in batches():
        noise = torch.randn(inputs.shape[0], 3)
        found += [judge(inputs, noise), forge(noise)]
    return [*found, *show(generator, optimizers[0]), *show(critic, optimizers[1])]


def two_optimizers_in_one_job(make):
    model = make_model()
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.AdamW(model[3:].parameters(), lr=1e-2)]
    train = make(lambda x, y: F.cross_entropy(model(x), y), model, optimizers)
    return [*[train(*batch) for batch in batches()], *show(model, *optimizers)]


def small_parameters(make):
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.shift = nn.Parameter(torch.zeros(1))
            self.row = nn.Parameter(torch.randn(1, 6))
            self.layer = nn.Linear(6, 1)

        def forward(self, x):
            return self.layer(x * self.scale + self.row) + self.shift

    model = Small()
    optimizer = adamw(model)
    train = make(lambda x: model(x).square().mean(), model, optimizer, clip_norm=0.5)
    return [*[train(inputs) for inputs, _ in batches()], *show(model, optimizer)]


def transposed_parameter(make):
    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 6).t())
            self.gaps = nn.Parameter(torch.randn(4, 10)[:, ::2])
            self.complex = nn.Parameter(torch.randn(4, 5, dtype=torch.complex128))

        def forward(self, x):
            return x @ self.weight @ self.gaps.t() @ (self.complex @ self.complex.mH).real

    model = Transposed()
    optimizer = sgd(model)
    train = make(lambda x: model(x).square().mean(), model, optimizer, clip_norm=0.5)
    found = [train(inputs) for inputs, _ in batches()]
    assert (model.weight.stride(), model.complex.stride()) == ((1, 6), (5, 1))
    assert model.gaps.stride() in ((10, 2), (5, 1))  # a whole value that is made of shards has no gaps
    return [*found, *show(model, optimizer)]


def parametrized_weight(make):
    model = make_model()
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.orthogonal(model[3])
    return train_classifier(make, model, sgd(model))


def old_weight_norm(make):
    model = make_model()
    nn.utils.weight_norm(model[0])
    return train_classifier(make, model, sgd(model))


def checkpointed_activations(make):
    model = make_model()
    optimizer = adamw(model)

    def loss(x, y):
        hidden = torch.utils.checkpoint.checkpoint(model[:3], x, use_reentrant=False)
        return F.cross_entropy(model[3:](hidden), y)

    train = make(loss, model, optimizer)
    return [*[train(*batch) for batch in batches()], *show(model, optimizer)]


def read_values_in_the_job(make):
    model = make_model()
    optimizer = adamw(model)

    def loss(x, y):
        factor = 2.0 if model[0].bias.sum() > 0 else 0.5
        return factor * F.cross_entropy(model(x), y)

    train = make(loss, model, optimizer)
    return [*[train(*batch) for batch in batches()], *show(model, optimizer)]


def losses_per_sample(make):
    model = make_model()
    optimizer = adamw(model)
    train = make(lambda x, y: (F.cross_entropy(model(x), y, reduction="none"), model(x)), model, optimizer)
    return [*[value for batch in batches() for value in train(*batch)], *show(model, optimizer)]


def list_cases(names):
    """Return the functions of a module that take `make`, by name."""
    return {
        name: function
        for name, function in names.items()
        if getattr(function, "__module__", "") == names["__name__"]
        and getattr(getattr(function, "__code__", None), "co_varnames", ())[:1] == ("make",)
        and function.__code__.co_argcount == 1
    }


CASES = list_cases(globals())

"""Scripts that read, change, copy and save divided states outside jobs.

Each function receives `make`, which makes a job in this process's world, and returns tensors. The same code runs on
one device and on several workers, and must return the same.
"""

import copy
import io

import torch
import torch.nn.functional as F
from support.trainings import adamw, batches, list_cases, make_model, sgd, show, train_classifier
from torch import nn


def average_outside_the_job(make):
    model = make_model()
    average = copy.deepcopy(model)

    def update():
        for kept, new in zip(average.parameters(), model.parameters(), strict=True):
            kept.data.mul_(0.9).add_(new.data, alpha=0.1)

    found = train_classifier(make, model, adamw(model), update)
    return [*found, *show(average)]


def weights_clipped_outside_the_job(make):
    model = make_model()

    def clip():
        for parameter in model.parameters():
            parameter.data.clamp_(-0.2, 0.2)

    return train_classifier(make, model, sgd(model), clip)


def weights_changed_through_views(make):
    model = make_model()

    def change():
        with torch.no_grad():
            model[0].weight[0].zero_()
            model[3].weight.view(-1)[7] = 0.5
            model[3].bias.detach()[1] += 1
            model[5].weight.detach().numpy()[2, 1] = 0.25
            nn.init.constant_(model[5].bias, 0.1)
            torch._foreach_mul_([model[2].weight, model[2].bias], 1.1)
            model[0].bias.copy_(torch.arange(9.0))

    return train_classifier(make, model, adamw(model), change)


def data_replaced(make):
    model = make_model()

    def replace():
        model[0].weight.data = model[0].weight.data * 0.5
        model[3].bias.data = torch.ones(5)

    return train_classifier(make, model, adamw(model), replace)


def a_view_that_the_script_keeps(make):
    model = make_model()
    kept = [model[0].weight.data, model[3].weight.detach(), model[5].bias.view(2, 2)]

    def read_and_change():
        kept[0][1, 1] += 0.125
        return torch.stack([kept[0].sum(), kept[1].sum(), kept[2].sum()]).detach()

    return train_classifier(make, model, adamw(model), read_and_change)


def a_view_made_later_that_the_script_keeps(make):
    model = make_model()
    kept = []

    def read_and_change():
        if not kept:
            kept.append(model[0].weight.data)
        kept[0][1, 1] += 0.125
        return kept[0].sum()

    return train_classifier(make, model, sgd(model), read_and_change)


def evaluated_by_plain_calls(make):
    model = make_model()
    inputs = torch.linspace(-1, 1, 18).view(3, 6)

    def evaluate():
        with torch.no_grad():
            return model(inputs)

    return train_classifier(make, model, adamw(model), evaluate)


def evaluated_by_a_job(make):
    model = make_model()
    inputs = torch.linspace(-1, 1, 24).view(4, 6)
    predict = make(lambda x: model(x), model, None)
    first = predict(inputs)
    return [first, *train_classifier(make, model, adamw(model), lambda: predict(inputs))]


def gradients_by_the_script(make):
    model = make_model()
    inputs = torch.linspace(-1, 1, 18).view(3, 6)

    def differentiate():
        model.zero_grad()
        model(inputs).square().sum().backward()
        slopes = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        model.zero_grad()
        return slopes

    return train_classifier(make, model, adamw(model), differentiate)


def steps_by_the_script(make):
    model = make_model()
    optimizer = sgd(model)
    inputs = torch.linspace(-1, 1, 18).view(3, 6)

    def step():
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return train_classifier(make, model, optimizer, step)


def copied_model(make):
    model = make_model()
    copies = []

    def copy_it():
        copies.append(copy.deepcopy(model))
        assert all(type(parameter) is nn.Parameter for parameter in copies[-1].parameters())

    found = train_classifier(make, model, adamw(model), copy_it)
    return [*found, *[value for made in copies for value in show(made)]]


def saved_and_loaded(make):
    model = make_model()
    optimizer = adamw(model)
    train = make(lambda x, y: F.cross_entropy(model(x), y), model, optimizer)
    found, saved = [], None
    for number, (inputs, labels) in enumerate(batches()):
        found.append(train(inputs, labels))
        if number == 1:
            saved = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "whole": model}, saved)
        if number == 3:
            saved.seek(0)
            states = torch.load(saved, weights_only=False)
            model.load_state_dict(states["model"])
            optimizer.load_state_dict(states["optimizer"])
            found += [parameter.detach() for parameter in states["whole"].parameters()]
    return [*found, *show(model, optimizer)]


def state_loaded_before_the_first_call(make):
    first = make_model()
    before = adamw(first)
    for inputs, labels in batches(2):
        before.zero_grad()
        F.cross_entropy(first(inputs), labels).backward()
        before.step()
    model = make_model()
    model.load_state_dict(first.state_dict())
    optimizer = adamw(model)
    optimizer.load_state_dict(before.state_dict())
    return train_classifier(make, model, optimizer)


def parameter_from_the_closure(make):
    model = make_model()
    weight = model[0].weight
    optimizer = adamw(model)

    def loss(x, y):
        with torch.no_grad():
            scale = 1 + weight.square().mean()
        return scale * F.cross_entropy(model(x), y)

    train = make(loss, model, optimizer)
    return [*[train(*batch) for batch in batches()], *show(model, optimizer)]


def state_read_and_changed(make):
    model = make_model()
    optimizer = adamw(model)

    def change():
        state = optimizer.state[model[0].weight]
        state["exp_avg"].mul_(0.5)
        return state["exp_avg_sq"].sum()

    return train_classifier(make, model, optimizer, change)


def state_cleared(make):
    model = make_model()
    optimizer = adamw(model)
    return train_classifier(make, model, optimizer, optimizer.state.clear)


def saved_and_loaded_with_adafactor(make):
    model = make_model()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
    train = make(lambda x, y: F.cross_entropy(model(x), y), model, optimizer)
    found, saved = [], io.BytesIO()
    for number, (inputs, labels) in enumerate(batches()):
        found.append(train(inputs, labels))
        if number == 1:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
        if number == 3:
            saved.seek(0)
            states = torch.load(saved)
            model.load_state_dict(states["model"])
            optimizer.load_state_dict(states["optimizer"])
            optimizer.state[model[0].weight]["row_var"].mul_(2)
    return [*found, *show(model, optimizer)]


ACCESSES = list_cases(globals())

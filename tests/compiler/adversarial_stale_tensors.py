"""Adversarial cases with tensors, classes and PyTorch modes that change between calls."""

import torch
import torch.nn.functional as F
from adversarial_cases import AdversarialCase, Script, batches, perceptron, rows
from adversarial_stale_modules import at_call, classifier
from torch import nn
from torch.overrides import TorchFunctionMode


def parameter_replaced():
    model = perceptron()
    new = nn.Parameter(torch.randn(8, 6).double())
    return classifier(model, at_call(1, lambda: setattr(model[0], "weight", new)))


def parameter_that_gets_other_data():
    model = perceptron()
    new = torch.randn(8, 6).double()
    return classifier(model, at_call(1, lambda: setattr(model[0].weight, "data", new)))


def bias_taken_away():
    model = perceptron()
    return classifier(model, at_call(1, lambda: setattr(model[0], "bias", None)))


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4).double()
        self.register_buffer("shift", torch.ones(4).double())
        self.register_buffer("other", torch.ones(4).double())

    def forward(self, features):
        scores = self.linear(features)
        if self.shift is not None:
            scores = scores + self.shift * self.shift.numel()
        self.other.add_(1)
        return scores + self.other


def buffer_replaced_outside():
    model = Buffered()
    return classifier(model, lambda number: setattr(model, "shift", torch.full((4,), number + 1.0).double()))


def buffer_of_another_shape():
    model = Buffered()
    return classifier(model, lambda number: setattr(model, "shift", torch.ones(1 if number == 1 else 4).double()))


def buffer_of_another_dtype():
    model = Buffered()
    return classifier(model, at_call(1, lambda: setattr(model, "shift", torch.ones(4, dtype=torch.int64))))


def buffer_taken_away():
    model = Buffered()
    return classifier(model, at_call(1, lambda: setattr(model, "shift", None)))


def buffers_that_become_one():
    model = Buffered()
    return classifier(model, at_call(1, lambda: setattr(model, "shift", model.other)))


class TwoMatrices(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()

    def forward(self, features):
        return self.second(torch.tanh(self.first(features)))


def weights_tied_later():
    model = TwoMatrices()
    return classifier(model, at_call(1, lambda: setattr(model.second, "weight", model.first.weight)))


def weights_untied_later():
    model = TwoMatrices()
    model.second.weight = model.first.weight
    new = nn.Parameter(torch.randn(6, 6).double())
    return classifier(model, at_call(1, lambda: setattr(model.second, "weight", new)))


def forward_replaced_on_the_object():
    model = perceptron()
    return classifier(model, at_call(1, lambda: setattr(model[1], "forward", torch.sigmoid)))


def forward_replaced_on_the_class():
    class Bent(nn.Module):
        def forward(self, value):
            return torch.tanh(value)

    model = nn.Sequential(nn.Linear(6, 8), Bent(), nn.Linear(8, 4)).double()
    return classifier(model, at_call(1, lambda: setattr(Bent, "forward", lambda _self, value: torch.sigmoid(value))))


def forward_replaced_on_a_class_of_torch():
    model, original = perceptron(), nn.Tanh.forward

    def change(number):
        nn.Tanh.forward = (lambda _self, value: torch.sigmoid(value)) if number == 1 else original

    return classifier(model, change)


def class_of_a_part_exchanged():
    model = perceptron()
    return classifier(model, at_call(1, lambda: setattr(model[1], "__class__", nn.Sigmoid)))


def model_that_is_not_given_changes():
    model = perceptron()
    teacher = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 4)).double().requires_grad_(False)

    def loss(features, labels):
        with torch.no_grad():
            target = teacher(features)
        return F.mse_loss(model(features), target) + 0 * labels.sum()

    change = lambda number: teacher.train(number == 1) and None  # noqa: E731 - as scripts have it
    return Script(function=loss, modules={"model": model}, batches=batches(), before_call=change)


def floats_instead_of_doubles():
    model = perceptron()

    def loss(features, labels):
        return F.cross_entropy(model(features.to(model[0].weight.dtype)), labels)

    change = at_call(1, lambda: model.float())
    return Script(function=loss, modules={"model": model}, batches=batches(), before_call=change)


class Switch:
    """Enters a context before one call and exits it before the next."""

    def __init__(self, context):
        self.context = context

    def __call__(self, number):
        if number == 1:
            self.context.__enter__()
        if number == 2:
            self.context.__exit__(None, None, None)


def autocast_around_a_call():
    model = perceptron().float()
    make = lambda: rows(dtype=torch.float32)  # noqa: E731 - as scripts have it
    return classifier(model, Switch(torch.autocast("cpu", dtype=torch.bfloat16)), make=make)


def default_dtype():
    model = perceptron()

    def loss(features, labels):
        return F.cross_entropy(model(features), labels) * torch.ones(3).div(3.0).sum()

    change = lambda number: torch.set_default_dtype(torch.float64 if number == 1 else torch.float32)  # noqa: E731
    return Script(function=loss, modules={"model": model}, batches=batches(), before_call=change)


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is F.cross_entropy else result


def torch_function_mode_around_a_call():
    return classifier(perceptron(), Switch(Doubling()))


def attention_by_another_backend():
    model = nn.Linear(6, 18).double()

    def loss(sequence):
        query, key, value = (part.unflatten(-1, (2, 3)).transpose(1, 2) for part in model(sequence).chunk(3, -1))
        return F.scaled_dot_product_attention(query, key, value).pow(2).mean()

    make = lambda: (torch.randn(3, 5, 6).double(),)  # noqa: E731 - as scripts have it
    switch = Switch(nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH))
    return Script(function=loss, modules={"model": model}, batches=batches(make), before_call=switch)


SUPPORTED = [
    *(parameter_replaced, parameter_that_gets_other_data, bias_taken_away, buffer_replaced_outside),
    *(buffer_of_another_shape, buffer_of_another_dtype, buffer_taken_away, buffers_that_become_one),
    *(weights_tied_later, weights_untied_later, forward_replaced_on_the_object, forward_replaced_on_the_class),
    *(forward_replaced_on_a_class_of_torch, class_of_a_part_exchanged, model_that_is_not_given_changes),
    *(default_dtype, torch_function_mode_around_a_call, attention_by_another_backend),
]
CASES = [
    *(AdversarialCase(build=build) for build in SUPPORTED),
    AdversarialCase(build=floats_instead_of_doubles, tolerance=1e-5),
    AdversarialCase(build=autocast_around_a_call, tolerance=1e-5),
]

"""Adversarial cases with modules that change between calls: hooks, parametrizations, settings, modes, submodules."""

import warnings

import torch
import torch.nn.functional as F
from adversarial_cases import AdversarialCase, Script, batches, perceptron, rows
from torch import nn
from torch.nn.utils import parametrizations, parametrize


def classifier(model, change, *, make=rows, count=3, modules=None):
    """Return a script whose model classifies rows and changes before each call."""

    def loss(features, labels):
        return F.cross_entropy(model(features), labels)

    given = {"model": model} if modules is None else modules
    return Script(function=loss, modules=given, batches=batches(make, count), before_call=change)


def at_call(number, do):
    """Return a `before_call` that applies a change before one call only."""
    return lambda now: do() and None if now == number else None


def deep():
    return nn.Sequential(
        *(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    ).double()


def tripled(_module, _given, result):
    return result * 3


def hook_added_later():
    model = perceptron()
    return classifier(model, at_call(1, lambda: model[0].register_forward_hook(tripled)))


def hook_removed_later():
    model = perceptron()
    handle = model[0].register_forward_hook(tripled)
    return classifier(model, at_call(1, handle.remove))


def hook_exchanged():
    model = perceptron()
    handle = model[0].register_forward_hook(tripled)

    def change():
        handle.remove()
        model[0].register_forward_hook(lambda _module, _given, result: result * 5)

    return classifier(model, at_call(1, change))


def hook_before_added_later():
    model = perceptron()
    hook = lambda _module, given: (given[0] * 2,)  # noqa: E731 - as scripts have it
    return classifier(model, at_call(1, lambda: model[2].register_forward_pre_hook(hook)))


def hook_of_backward_added_later():
    model = perceptron()

    def hook(_module, gradients, _of_outputs):
        return tuple(None if gradient is None else gradient * 3 for gradient in gradients)

    return classifier(model, at_call(1, lambda: model[2].register_full_backward_hook(hook)))


def hook_before_backward_added_later():
    model = perceptron()
    hook = lambda _module, gradients: (gradients[0] * 3,)  # noqa: E731 - as scripts have it
    return classifier(model, at_call(1, lambda: model[2].register_full_backward_pre_hook(hook)))


def hook_of_all_modules():
    model = perceptron()
    handles = []

    def change(number):
        if number == 1:
            handles.append(nn.modules.module.register_module_forward_hook(tripled))
        elif handles:
            handles.pop().remove()

    return classifier(model, change)


def hook_that_reads_a_closure():
    model, scale = perceptron(), 1.0
    model[0].register_forward_hook(lambda _module, _given, result: result * scale)

    def change(number):
        nonlocal scale
        scale = number + 1.0

    return classifier(model, change)


def hook_on_a_parameter_added_later():
    model = perceptron()

    def loss(features, labels):  # the line
        return F.cross_entropy(model(features), labels)

    change = at_call(1, lambda: model[0].weight.register_hook(lambda gradient: gradient * 3))
    return Script(function=loss, modules={"model": model}, batches=batches(), before_call=change)


class Half(nn.Module):
    def forward(self, value):
        return value * 0.5


def parametrization_registered_later():
    model = perceptron()

    def change(number):
        if number == 1:
            parametrize.register_parametrization(model[0], "weight", Half())
        if number == 2:
            parametrize.remove_parametrizations(model[0], "weight")

    return classifier(model, change)


def weight_norm_later():
    model = perceptron()
    return classifier(model, at_call(1, lambda: parametrizations.weight_norm(model[0])))


def spectral_norm_later():
    model = perceptron()
    return classifier(model, at_call(1, lambda: parametrizations.spectral_norm(model[0])))


def old_weight_norm_later():
    model = perceptron()

    def loss(features, labels):  # the line
        return F.cross_entropy(model(features), labels)

    def change():
        with warnings.catch_warnings(action="ignore"):
            nn.utils.weight_norm(model[0])

    return Script(function=loss, modules={"model": model}, batches=batches(), before_call=at_call(1, change))


def set_later(name, value, place):
    model = deep()
    return classifier(model, at_call(1, lambda: setattr(model[place], name, value)))


def chance_of_dropout():
    return set_later("p", 0.25, 2)


def momentum_of_batch_norm():
    return set_later("momentum", 0.5, 1)


def epsilon_of_batch_norm():
    return set_later("eps", 0.5, 1)


def batch_norm_without_running_statistics():
    return set_later("track_running_stats", False, 1)


def mode_of_a_part():
    model = deep()
    return classifier(model, lambda number: model[1].train(number != 1))


def mode_of_the_model():
    model = deep()
    return classifier(model, lambda number: model.train(number != 1))


def mode_of_a_part_added_later():
    model = perceptron()

    def change(number):
        if number == 1:
            model.insert(1, nn.Dropout(0.5))
        if number == 2:
            model[1].eval()

    return classifier(model, change)


def mode_set_inside():
    model = deep()

    def loss(features, labels):
        model.train()
        model[1].eval()
        return F.cross_entropy(model(features), labels), model.training, model[1].training

    change = lambda number: model.train(number != 1)  # noqa: E731 - as scripts have it
    return Script(function=loss, modules={"model": model}, batches=batches(), before_call=change)


def layers_unfrozen_later():
    model = perceptron()
    model[0].requires_grad_(False)
    return classifier(model, at_call(1, lambda: model[0].requires_grad_(True)))


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6).double() for _ in range(2))
        self.output = nn.Linear(6, 4).double()

    def forward(self, features):
        for layer in self.layers:
            features = torch.tanh(layer(features))
        return self.output(features)


def module_appended_to_a_list():
    model, more = Listed(), nn.Linear(6, 6).double()
    return classifier(model, at_call(1, lambda: model.layers.append(more)))


def module_removed_from_a_list():
    model = Listed()
    return classifier(model, at_call(1, lambda: model.layers.__delitem__(0)))


def modules_of_a_list_in_another_order():
    model = Listed()

    def change():
        model.layers[0], model.layers[1] = model.layers[1], model.layers[0]

    return classifier(model, at_call(1, change))


def part_exchanged():
    model = perceptron()

    def change():
        model[1] = nn.Sigmoid()

    return classifier(model, at_call(1, change))


def list_of_parts_emptied():
    model = Listed()
    return classifier(model, at_call(1, lambda: setattr(model, "layers", nn.ModuleList())))


class Blocks(nn.Module):
    """Keeps its blocks in a plain list besides the registered ones, as some models do."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 4).double(), nn.Linear(6, 4).double()
        self.order = [self.first]

    def forward(self, features):
        return sum(block(features) for block in self.order)


def plain_list_of_parts_changed():
    model = Blocks()
    return classifier(model, at_call(1, lambda: model.order.append(model.second)))


SUPPORTED = [
    *(hook_added_later, hook_removed_later, hook_exchanged, hook_before_added_later, hook_of_backward_added_later),
    *(hook_before_backward_added_later, hook_of_all_modules, hook_that_reads_a_closure),
    *(parametrization_registered_later, weight_norm_later, spectral_norm_later, chance_of_dropout),
    *(momentum_of_batch_norm, epsilon_of_batch_norm, batch_norm_without_running_statistics, mode_of_a_part),
    *(mode_of_the_model, mode_of_a_part_added_later, mode_set_inside, layers_unfrozen_later),
    *(module_appended_to_a_list, module_removed_from_a_list, modules_of_a_list_in_another_order, part_exchanged),
    *(list_of_parts_emptied, plain_list_of_parts_changed),
]
CASES = [
    *(AdversarialCase(build=build) for build in SUPPORTED),
    AdversarialCase(build=hook_on_a_parameter_added_later, refused=r"a hook on parameter model\.0\.weight"),
    AdversarialCase(build=old_weight_norm_later),
]

"""Adversarial cases with Python state: what a job reads from and writes to closures, globals, attributes and clocks."""

import logging
import random
import time
import types

import numpy
import torch
import torch.nn.functional as F
from adversarial_cases import AdversarialCase, Script, batches, perceptron
from torch import nn

SCALE = 1.0
SETTINGS = {"scale": 1.0}


def closure_value():
    model, scale = perceptron(), 1.0

    def loss(features, labels):
        return F.cross_entropy(model(features), labels) * scale

    def change(number):
        nonlocal scale
        scale = number + 1.0

    return Script(function=loss, modules={"model": model}, batches=batches(), before_call=change)


def closure_value_two_functions_deep():
    model, scale = perceptron(), 1.0

    def scaled(value):
        return value * scale

    def loss(features, labels):
        return scaled(F.cross_entropy(model(features), labels))

    def change(number):
        nonlocal scale
        scale = number + 1.0

    return Script(function=loss, modules={"model": model}, batches=batches(), before_call=change)


def global_value():
    model = perceptron()

    def loss(features, labels):
        return F.cross_entropy(model(features), labels) * SCALE

    def change(number):
        global SCALE
        SCALE = number + 1.0

    return Script(function=loss, modules={"model": model}, batches=batches(), before_call=change)


def value_in_a_global_dict():
    model = perceptron()

    def loss(features, labels):
        return F.cross_entropy(model(features), labels) * SETTINGS["scale"]

    def change(number):
        SETTINGS["scale"] = number + 1.0

    return Script(function=loss, modules={"model": model}, batches=batches(), before_call=change)


def attribute_of_the_module():
    model = perceptron()
    model.scale = 1.0

    def loss(features, labels):
        return F.cross_entropy(model(features), labels) * model.scale

    def change(number):
        model.scale = number + 1.0

    return Script(function=loss, modules={"model": model}, batches=batches(), before_call=change)


def attribute_two_levels_deep():
    model = perceptron()
    settings = types.SimpleNamespace(optimizer=types.SimpleNamespace(scale=1.0))

    def loss(features, labels):
        return F.cross_entropy(model(features), labels) * settings.optimizer.scale

    def change(number):
        settings.optimizer.scale = number + 1.0

    return Script(function=loss, modules={"model": model}, batches=batches(), before_call=change)


class CountingCalls(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4).double()
        self.calls = 0

    def forward(self, features):
        self.calls += 1
        return self.linear(features) * self.calls


def counter_in_the_module():
    model = CountingCalls()

    def loss(features, labels):  # the line
        return F.cross_entropy(model(features), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def counter_in_the_closure():
    model, count = perceptron(), 0

    def loss(features, labels):  # the line
        nonlocal count
        count += 1
        return F.cross_entropy(model(features), labels) * count

    return Script(function=loss, modules={"model": model}, batches=batches())


def counter_in_a_dict():
    model, counts = perceptron(), {"calls": 0}

    def loss(features, labels):  # the line
        counts["calls"] += 1
        return F.cross_entropy(model(features), labels) * counts["calls"]

    return Script(function=loss, modules={"model": model}, batches=batches())


def losses_collected_in_a_list():
    model, seen = perceptron(), []

    def loss(features, labels):
        value = F.cross_entropy(model(features), labels)
        seen.append(value.detach())  # the line
        return value

    return Script(function=loss, modules={"model": model}, batches=batches())


def text_collected_in_a_list():
    model, lines = perceptron(), []

    def loss(features, labels):  # the line
        lines.append("called")
        return F.cross_entropy(model(features), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def random_number_of_python():
    model = perceptron()

    def loss(features, labels):
        return F.cross_entropy(model(features), labels) * random.random()  # the line

    return Script(function=loss, modules={"model": model}, batches=batches())


def random_number_of_numpy():
    model = perceptron()

    def loss(features, labels):
        return F.cross_entropy(model(features), labels) * numpy.random.rand()  # the line

    return Script(function=loss, modules={"model": model}, batches=batches())


def wall_clock():
    model = perceptron()

    def loss(features, labels):
        return F.cross_entropy(model(features), labels) * (time.time() % 7)  # the line

    return Script(function=loss, modules={"model": model}, batches=batches())


def closure_tensor_changed_in_place():
    model, weights = perceptron(), torch.ones(4, dtype=torch.float64)

    def loss(features, labels):
        return F.cross_entropy(model(features), labels, weights)

    def change(number):
        weights[0] = number + 1.0

    return Script(function=loss, modules={"model": model}, batches=batches(), before_call=change)


def closure_tensor_rebound():
    model, weights = perceptron(), torch.ones(4, dtype=torch.float64)

    def loss(features, labels):
        return F.cross_entropy(model(features), labels, weights)

    def change(number):
        nonlocal weights
        weights = torch.tensor([number + 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)

    return Script(function=loss, modules={"model": model}, batches=batches(), before_call=change)


def closure_tensor_written_inside():
    model, total = perceptron(), torch.zeros((), dtype=torch.float64)

    def loss(features, labels):
        value = F.cross_entropy(model(features), labels)
        total.add_(value.detach())  # the line
        return value + total

    return Script(function=loss, modules={"model": model}, batches=batches())


class Logging(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4).double()

    def forward(self, features):
        logging.getLogger("rankless.tests.adversarial").debug("features of shape %s", features.shape)
        return self.linear(features)


def logger_in_the_model():
    model = Logging()

    def loss(features, labels):
        return F.cross_entropy(model(features), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


CASES = [
    AdversarialCase(build=closure_value),
    AdversarialCase(build=closure_value_two_functions_deep),
    AdversarialCase(build=global_value),
    AdversarialCase(build=value_in_a_global_dict),
    AdversarialCase(build=attribute_of_the_module),
    AdversarialCase(build=attribute_two_levels_deep),
    AdversarialCase(build=counter_in_the_module, refused=r"model\.calls was \d and is \d after the job"),
    AdversarialCase(build=counter_in_the_closure, refused=r"count was \d and is \d after the job"),
    AdversarialCase(
        build=counter_in_a_dict, refused=r"counts was \{'calls': \d\} and is \{'calls': \d\} after the job"
    ),
    AdversarialCase(build=losses_collected_in_a_list, refused=r"seen\[0\], in which the job keeps a tensor"),
    AdversarialCase(build=text_collected_in_a_list, refused=r"lines was \['called'\] and is \['called', 'called'\]"),
    AdversarialCase(build=random_number_of_python, refused=r"calls random\.random;"),
    AdversarialCase(build=random_number_of_numpy, refused=r"calls numpy\.random\.rand;"),
    AdversarialCase(build=wall_clock, refused=r"calls time\.time;"),
    AdversarialCase(build=closure_tensor_changed_in_place),
    AdversarialCase(build=closure_tensor_rebound),
    AdversarialCase(build=closure_tensor_written_inside, refused=r"from outside the job changed in place"),
    AdversarialCase(build=logger_in_the_model),
]

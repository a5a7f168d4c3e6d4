"""Adversarial cases with generators of the script's own: where they come from, and when their state changes."""

import torch
import torch.nn.functional as F
from adversarial_cases import AdversarialCase, Script, batches, perceptron
from torch import nn


def make_generator(seed=5):
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def closure_generator():
    model, generator = perceptron(), make_generator()

    def loss(features, labels):
        noise = torch.randn(features.shape, generator=generator, dtype=features.dtype)
        return F.cross_entropy(model(features + noise), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def two_generators_beside_the_default_one():
    model, one, other = perceptron(), make_generator(1), make_generator(2)

    def loss(features, labels):
        kept = torch.rand(features.shape, generator=other, dtype=features.dtype) > 0.3
        noise = torch.randn_like(features) + torch.randn(features.shape, generator=one, dtype=features.dtype)
        again = torch.rand(features.shape[0], 1, generator=other, dtype=features.dtype)
        return F.cross_entropy(F.dropout(model(features * kept + noise * again), 0.2), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def every_operator_that_takes_a_generator():
    model, generator = perceptron(), make_generator()

    def loss(features, labels):
        count = features.shape[0]
        weights = features.abs().softmax(1)
        mask = torch.empty_like(features).bernoulli_(0.6, generator=generator)
        drawn = torch.bernoulli(weights, generator=generator) + torch.normal(features, 0.1, generator=generator)
        drawn = drawn + torch.empty_like(features).uniform_(-1, 1, generator=generator)
        drawn = drawn + torch.empty_like(features).normal_(0, 0.2, generator=generator)
        drawn = drawn + torch.empty_like(features).exponential_(2.0, generator=generator)
        drawn = drawn + torch.poisson(features.abs() * 3, generator=generator) / 10
        order = torch.randperm(count, generator=generator)
        picked = torch.multinomial(weights, 2, generator=generator)
        numbers = torch.randint(0, 3, (count,), generator=generator)
        scale = torch.rand(count, 1, generator=generator, dtype=features.dtype) + numbers.unsqueeze(1)
        rows = (features * mask + drawn * scale)[order]
        return F.cross_entropy(model(rows), labels) + model(rows.gather(1, picked).repeat(1, 3)).square().mean()

    return Script(function=loss, modules={"model": model}, batches=batches())


def generator_seeded_again_between_calls():
    model, generator = perceptron(), make_generator()

    def loss(features, labels):
        return F.cross_entropy(model(features * torch.rand(6, generator=generator, dtype=features.dtype)), labels)

    def change(number):
        generator.manual_seed(100 + number // 2)

    return Script(function=loss, modules={"model": model}, batches=batches(count=4), before_call=change)


def generator_replaced_between_calls():
    model, held = perceptron(), {"generator": make_generator()}

    def loss(features, labels):
        numbers = torch.rand(6, generator=held["generator"], dtype=features.dtype)
        return F.cross_entropy(model(features * numbers), labels)

    def change(number):
        if number == 2:
            held["generator"] = make_generator(77)

    return Script(function=loss, modules={"model": model}, batches=batches(count=4), before_call=change)


class Noisy(nn.Module):
    """A layer with a generator of its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4).double()
        self.generator = make_generator()

    def forward(self, features):
        noise = torch.randn(features.shape, generator=self.generator, dtype=features.dtype)
        return self.linear(features + noise * 0.1)


def generator_of_a_module():
    model = Noisy()

    def loss(features, labels):
        return F.cross_entropy(model(features), labels)

    def change(number):
        if number == 1:
            model.generator = make_generator(8)

    return Script(function=loss, modules={"model": model}, batches=batches(count=4), before_call=change)


def generator_drawn_from_outside_too():
    model, generator = perceptron(), make_generator()

    def loss(features, labels):
        return F.cross_entropy(model(features * torch.rand(6, generator=generator, dtype=features.dtype)), labels)

    def change(number):
        torch.rand(number, generator=generator)

    return Script(function=loss, modules={"model": model}, batches=batches(count=4), before_call=change)


def generator_that_is_the_default_one():
    model = perceptron()

    def loss(features, labels):
        numbers = torch.rand(6, generator=torch.default_generator, dtype=features.dtype)
        return F.cross_entropy(model(F.dropout(features, 0.3) * numbers), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def generator_whose_numbers_nobody_uses():
    model, generator = perceptron(), make_generator()

    def loss(features, labels):
        torch.rand(17, generator=generator)
        numbers = torch.rand(6, generator=generator, dtype=features.dtype)
        return F.cross_entropy(model(features * numbers), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def generator_made_in_the_job():
    model = perceptron()

    def loss(features, labels):
        numbers = torch.rand(6, generator=torch.Generator(torch.get_default_device()), dtype=features.dtype)  # the line
        return F.cross_entropy(model(features * numbers), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def generator_seeded_in_the_job():
    model, generator = perceptron(), make_generator()

    def loss(features, labels):
        generator.manual_seed(3)  # the line
        numbers = torch.rand(6, generator=generator, dtype=features.dtype)
        return F.cross_entropy(model(features * numbers), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


CASES = [
    AdversarialCase(build=closure_generator),
    AdversarialCase(build=two_generators_beside_the_default_one),
    AdversarialCase(build=every_operator_that_takes_a_generator),
    AdversarialCase(build=generator_seeded_again_between_calls),
    AdversarialCase(build=generator_replaced_between_calls),
    AdversarialCase(build=generator_of_a_module),
    AdversarialCase(build=generator_drawn_from_outside_too),
    AdversarialCase(build=generator_that_is_the_default_one),
    AdversarialCase(build=generator_whose_numbers_nobody_uses),
    AdversarialCase(build=generator_made_in_the_job, refused=r"Generator"),
    AdversarialCase(build=generator_seeded_in_the_job, refused=r"state of a generator"),
]

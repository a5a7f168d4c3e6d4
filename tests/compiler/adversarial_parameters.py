"""Adversarial cases of jobs that change their own parameters, in place or by setting `.data`."""

import torch
import torch.nn.functional as F
from adversarial_cases import AdversarialCase, Script, batches, perceptron
from torch import nn


def script_starting(act):
    """Return a script whose job acts on its model before it uses it."""
    model = perceptron()

    def loss(features, labels):
        act(model, features)
        return F.cross_entropy(model(features), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def weights_clipped():
    def act(model, _):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)

    return script_starting(act)


def weights_clipped_through_data():
    def act(model, _):
        for parameter in model.parameters():
            parameter.data.clamp_(-0.2, 0.2)

    return script_starting(act)


def bias_from_the_batch():
    def act(model, features):
        with torch.no_grad():
            model[0].bias.lerp_(features.mean(0).sum(), 0.1)

    return script_starting(act)


def row_cleared_and_noise_added():
    def act(model, _):
        with torch.no_grad():
            model[2].weight[1].zero_()
            model[2].weight.add_(torch.randn_like(model[2].weight), alpha=0.01)

    return script_starting(act)


def weights_renormalized():
    def act(model, _):
        model[0].weight.data = torch.renorm(model[0].weight.data, 2, 0, 0.5)

    return script_starting(act)


def momentum_encoder_with_a_queue():
    query, key = perceptron(), perceptron()
    key.requires_grad_(False)
    key.register_buffer("queue", F.normalize(torch.randn(4, 10).double(), dim=0))

    def loss(features, labels):
        queries = F.normalize(query(features), dim=1)
        with torch.no_grad():
            for ours, theirs in zip(query.parameters(), key.parameters(), strict=True):
                theirs.data = theirs.data * 0.99 + ours.data * 0.01
            keys = F.normalize(key(features), dim=1)
        positive = (queries * keys).sum(1, keepdim=True)
        logits = torch.cat([positive, queries @ key.queue.clone()], 1)
        value = F.cross_entropy(logits / 0.2, torch.zeros_like(labels))
        with torch.no_grad():
            key.queue.copy_(torch.cat([keys.t(), key.queue[:, : -len(features)]], 1))
        return value

    return Script(function=loss, modules={"query": query, "key": key}, batches=batches())


def tied_parameter_changed_by_its_other_name():
    model = perceptron()
    model.again = nn.Linear(6, 8).double()
    model.again.weight = model[0].weight

    def loss(features, labels):
        with torch.no_grad():
            model.again.weight.mul_(0.5)
        return F.cross_entropy(model[2](model[0](features).tanh()), labels) + model.again(features).mean()

    return Script(function=loss, modules={"model": model}, batches=batches())


def script_with_another(compare) -> Script:
    """Return a job that gets one of two models; `compare` makes a loss of scores, features and the other model."""
    model, other = perceptron(), perceptron()

    def loss(features, labels):
        return F.cross_entropy(model(features), labels) + compare(model(features), features, other)

    return Script(function=loss, modules={"model": model}, batches=batches())


def teacher_without_gradient():
    def compare(scores, features, other):
        with torch.no_grad():
            wanted = other(features)
        return F.mse_loss(scores, wanted)

    return script_with_another(compare)


def teacher_that_is_detached():
    return script_with_another(lambda scores, features, other: F.mse_loss(scores, other(features).detach()))


def parameter_of_another_model_in_an_autograd_function():
    model, other = perceptron(), perceptron()

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, left, right):
            ctx.save_for_backward(left, right)
            return left @ right  # the line

        @staticmethod
        def backward(ctx, grad):
            left, right = ctx.saved_tensors
            return grad @ right.t(), left.t() @ grad

    def loss(features, labels):
        product = Product.apply(model(features), other[2].weight)
        return F.cross_entropy(model(features), labels) + product.mean()

    return Script(function=loss, modules={"model": model}, batches=batches())


def value_that_was_computed_from_another_model():
    model, other = perceptron(), perceptron()
    computed = other(torch.ones(1, 6, dtype=torch.float64))

    def loss(features, labels):
        return F.cross_entropy(model(features) + computed, labels)  # the line

    return Script(function=loss, modules={"model": model}, batches=batches())


def own_parameters_listed_before():
    model = perceptron()
    parameters = list(model.parameters())

    def loss(features, labels):
        penalty = sum(item.square().sum() for item in parameters)  # the line
        return F.cross_entropy(model(features), labels) + penalty

    return Script(function=loss, modules={"model": model}, batches=batches())


def own_parameters_listed_before_and_changed():
    model = perceptron()
    parameters = list(model.parameters())

    def loss(features, labels):
        with torch.no_grad():
            parameters[0].clamp_(-0.1, 0.1)  # the line
        return F.cross_entropy(model(features), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


OTHER_NAME = r"parameter 'model.0.weight' under a name of the script"
NOT_PASSED = r"of a module that was not passed"

CASES = [
    AdversarialCase(build=teacher_without_gradient),
    AdversarialCase(build=teacher_that_is_detached),
    AdversarialCase(build=parameter_of_another_model_in_an_autograd_function, refused=NOT_PASSED),
    AdversarialCase(build=value_that_was_computed_from_another_model, refused=NOT_PASSED),
    AdversarialCase(build=own_parameters_listed_before, refused=r"parameter 'model.\d.\w+' under a name of the script"),
    AdversarialCase(build=own_parameters_listed_before_and_changed, refused=OTHER_NAME),
    AdversarialCase(build=weights_clipped),
    AdversarialCase(build=weights_clipped_through_data),
    AdversarialCase(build=bias_from_the_batch),
    AdversarialCase(build=row_cleared_and_noise_added),
    AdversarialCase(build=weights_renormalized),
    AdversarialCase(build=momentum_encoder_with_a_queue),
    AdversarialCase(build=tied_parameter_changed_by_its_other_name),
]

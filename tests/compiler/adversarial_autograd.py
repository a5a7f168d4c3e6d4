"""Adversarial cases with autograd: hooks, custom functions, double backward, checkpointing, tied and frozen weights."""

import torch
import torch.nn.functional as F
from adversarial_cases import AdversarialCase, Script, batches, perceptron
from torch import nn
from torch.utils.checkpoint import checkpoint


class Twice(torch.autograd.Function):
    """Doubles its input; its backward uses another factor on purpose, so that a derived one would show."""

    @staticmethod
    def forward(_context, value):
        return value * 2

    @staticmethod
    def backward(_context, gradient):
        return gradient * 7


def custom_function():
    model = perceptron()

    def loss(features, labels):
        return F.cross_entropy(Twice.apply(model(features)), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def hook_on_a_tensor():
    model = perceptron()

    def loss(features, labels):
        scores = model(features)
        scores.register_hook(lambda gradient: gradient * 3)
        return F.cross_entropy(scores, labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def hook_on_a_parameter():
    model = perceptron()
    model[0].weight.register_hook(lambda gradient: gradient * 3)

    def loss(features, labels):  # the line
        return F.cross_entropy(model(features), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def hook_after_a_gradient_has_been_added():
    model = perceptron()
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(3) and None)

    def loss(features, labels):  # the line
        return F.cross_entropy(model(features), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def tripled(_module, gradients_of_inputs, _gradients_of_outputs):
    return tuple(None if gradient is None else gradient * 3 for gradient in gradients_of_inputs)


def full_backward_hook_of_a_module():
    model = perceptron()
    model[0].register_full_backward_hook(tripled)
    model[2].register_full_backward_hook(tripled)

    def loss(features, labels):
        return F.cross_entropy(model(features), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def smooth_perceptron():
    return nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 4)).double()


def gradient_penalty():
    model = smooth_perceptron()

    def loss(features, labels):
        features = features + 0 * model[0].weight.sum()
        scores = model(features)
        (slope,) = torch.autograd.grad(scores.sum(), features, create_graph=True)
        return slope.pow(2).sum() + F.cross_entropy(scores, labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 6).double()
        self.output = nn.Linear(6, 9, bias=False).double()
        self.output.weight = self.embedding.weight

    def forward(self, words):
        return self.output(torch.tanh(self.embedding(words)))


def tied_weights():
    model = Tied()

    def loss(words, following):
        return F.cross_entropy(model(words), following)

    def words():
        return torch.randint(0, 9, (5,)), torch.randint(0, 9, (5,))

    return Script(function=loss, modules={"model": model}, batches=batches(words))


def checkpoint_without_reentry():
    model = perceptron()

    def loss(features, labels):
        return F.cross_entropy(checkpoint(model, features, use_reentrant=False), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def checkpoint_of_dropout():
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 4)).double()

    def loss(features, labels):
        return F.cross_entropy(checkpoint(model, features, use_reentrant=False), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def checkpoint_with_reentry():
    model, first = perceptron(), nn.Linear(6, 6).double()

    def loss(features, labels):
        scores = checkpoint(model, first(features), use_reentrant=True)
        return F.cross_entropy(scores, labels)

    return Script(function=loss, modules={"model": model, "first": first}, batches=batches())


def requires_grad_that_changes_between_calls():
    model = perceptron()

    def loss(features, labels):
        return F.cross_entropy(model(features), labels)

    def change(number):
        model[0].weight.requires_grad_(number != 1)

    return Script(function=loss, modules={"model": model}, batches=batches(), before_call=change)


def requires_grad_set_inside():
    model = perceptron()

    def loss(features, labels):
        model[0].weight.requires_grad_(False)  # the line
        return F.cross_entropy(model(features), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def frozen_parameters():
    model = perceptron()
    model[0].requires_grad_(False)

    def loss(features, labels):
        return F.cross_entropy(model(features), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def no_grad_inside():
    model = perceptron()

    def loss(features, _labels):
        with torch.no_grad():
            target = model(features) * 2
        return F.mse_loss(model(features), target)

    return Script(function=loss, modules={"model": model}, batches=batches())


def backward_inside():
    model = perceptron()

    def loss(features, labels):
        value = F.cross_entropy(model(features), labels)
        value.backward()  # the line
        return value

    return Script(function=loss, modules={"model": model}, batches=batches())


def parameter_changed_inside():
    model = perceptron()

    def loss(features, labels):
        with torch.no_grad():
            model[0].weight.mul_(0.9)  # the line
        return F.cross_entropy(model(features), labels)

    return Script(function=loss, modules={"model": model}, batches=batches())


def script_of_tangents(model, features=lambda x: x):
    """Return a script whose loss depends on a model's forward-mode derivative."""

    def loss(x, labels):
        inputs = features(x)
        scores, tangents = torch.func.jvp(model, (inputs,), (torch.ones_like(inputs),))
        return F.cross_entropy(scores.reshape(len(x), -1)[:, :4], labels) + tangents.square().mean()

    return Script(function=loss, modules={"model": model}, batches=batches())


def forward_mode_of_a_sequence():
    return script_of_tangents(perceptron(), lambda x: x.unsqueeze(1))


class LastOutputs(nn.Module):
    """A recurrent layer that returns its outputs only."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.double()

    def forward(self, sequence):
        return self.layer(sequence)[0]


def forward_mode_of_an_lstm():
    return script_of_tangents(LastOutputs(nn.LSTM(6, 4, batch_first=True)), lambda x: x.unsqueeze(1))


def forward_mode_of_a_gru():
    return script_of_tangents(LastOutputs(nn.GRU(2, 4)), lambda x: x.view(-1, 3, 2).transpose(0, 1))


def dual_numbers():
    model = perceptron()

    def loss(features, labels):
        with torch.autograd.forward_ad.dual_level():
            inputs = torch.autograd.forward_ad.make_dual(features.unsqueeze(1), torch.ones(5, 1, 6).double())
            scores, tangent = torch.autograd.forward_ad.unpack_dual(model(inputs))
        return F.cross_entropy(scores[:, 0], labels) + tangent.square().sum()

    return Script(function=loss, modules={"model": model}, batches=batches())


CASES = [
    AdversarialCase(build=forward_mode_of_a_sequence),
    AdversarialCase(build=forward_mode_of_an_lstm),
    AdversarialCase(build=forward_mode_of_a_gru),
    AdversarialCase(build=dual_numbers),
    AdversarialCase(build=custom_function),
    AdversarialCase(build=hook_on_a_tensor),
    AdversarialCase(build=hook_on_a_parameter, refused=r"a hook on parameter model\.0\.weight"),
    AdversarialCase(build=hook_after_a_gradient_has_been_added, refused=r"a hook on parameter model\.0\.weight"),
    AdversarialCase(build=full_backward_hook_of_a_module),
    AdversarialCase(build=gradient_penalty),
    AdversarialCase(build=tied_weights),
    AdversarialCase(build=checkpoint_without_reentry),
    AdversarialCase(build=checkpoint_of_dropout),
    AdversarialCase(build=checkpoint_with_reentry),
    AdversarialCase(build=requires_grad_that_changes_between_calls),
    AdversarialCase(build=requires_grad_set_inside, refused=r"requires_grad"),
    AdversarialCase(build=frozen_parameters),
    AdversarialCase(build=no_grad_inside),
    AdversarialCase(build=backward_inside, refused=r"backward\(\) inside the job"),
    AdversarialCase(build=parameter_changed_inside),
]

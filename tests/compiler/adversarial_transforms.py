"""Adversarial cases with the transforms of `torch.func`, derivatives of recurrent layers, and sparse matrices."""

import torch
import torch.nn.functional as F
from adversarial_cases import AdversarialCase, Script, batches
from torch import nn

WIDTH = 3


def sequences():
    """Return a batch of sequences."""
    return (torch.randn(5, 4, WIDTH, dtype=torch.float64),)


def vectors():
    """Return a batch of rows."""
    return (torch.randn(5, WIDTH, dtype=torch.float64),)


def script_of(function, model, make=sequences, name="model"):
    return Script(function=function, modules={name: model.double()}, batches=batches(make, 2))


def gradient_of_a_sequence():
    model = nn.Linear(WIDTH, 2)

    def loss(x):
        slope = torch.func.grad(lambda given: model(given).sin().sum())(x)
        return slope.square().mean()

    return script_of(loss, model)


def gradient_of_a_recurrent_layer():
    model = nn.LSTM(WIDTH, 2, batch_first=True)
    return script_of(lambda x: torch.func.grad(lambda given: model(given)[0].square().sum())(x).square().mean(), model)


def gradients_of_samples():
    model = nn.Sequential(nn.Linear(WIDTH, 2), nn.Tanh())

    def loss(x):
        parameters = dict(model.named_parameters())

        def of_one(given, sample):
            return torch.func.functional_call(model, given, (sample[None],)).square().mean()

        slopes = torch.func.vmap(torch.func.grad(of_one), in_dims=(None, 0))(parameters, x)
        return sum(slope.square().mean() for slope in slopes.values())

    return script_of(loss, model)


def products_with_a_jacobian():
    model = nn.Linear(WIDTH, 2)

    def loss(x):
        result, multiply = torch.func.vjp(model, x)
        return multiply(result.cos())[0].square().mean()

    return script_of(loss, model)


def second_derivatives():
    model = nn.Linear(WIDTH, 2)

    def loss(x):
        return torch.func.vmap(torch.func.hessian(lambda row: model(row).tanh().sum()))(x).square().mean()

    return script_of(loss, model, vectors)


def laplacian():
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1))

    def loss(x):
        slopes = torch.func.jacfwd(torch.func.grad(lambda row: model(row).squeeze()))
        return (torch.func.vmap(lambda row: torch.trace(slopes(row)))(x) - 1).square().mean()

    return script_of(loss, model, vectors)


def changes_within_a_transform():
    model = nn.Linear(WIDTH, 2)

    def one(row):
        changed = model(row).clone()
        changed.add_(row[0])
        changed[0] = 1
        return changed.square().sum()

    return script_of(lambda x: torch.func.vmap(one)(x).mean(), model, vectors)


def column_changed_within_a_gradient():
    model = nn.Linear(WIDTH, 2)

    def scores(given):
        copied = given.clone()
        copied[:, 0].mul_(2)
        return model(copied).tanh().sum()

    def loss(x):
        return torch.func.grad(scores)(x).square().mean()  # the line

    return script_of(loss, model, vectors)


def penalty_of_a_recurrent_layer():
    model = nn.LSTM(WIDTH, 2, batch_first=True)

    def loss(x):
        points = x.detach().requires_grad_()
        scores = model(points)[0]
        (slope,) = torch.autograd.grad(scores.sum(), points, create_graph=True)
        return scores.square().mean() + (slope.flatten(1).norm(dim=1) - 1).square().mean()

    return script_of(loss, model)


def step_within_a_job():
    model = nn.GRU(WIDTH, 2, num_layers=2, bidirectional=True, batch_first=True)

    def loss(x):
        parameters = dict(model.named_parameters())
        first = torch.func.functional_call(model, parameters, (x,))[0].square().mean()
        slopes = torch.autograd.grad(first, list(parameters.values()), create_graph=True)
        moved = {name: item - 0.1 * slope for (name, item), slope in zip(parameters.items(), slopes, strict=True)}
        return torch.func.functional_call(model, moved, (x,))[0].sum(-1).square().mean()

    return script_of(loss, model)


def third_derivative_of_a_recurrent_layer():
    model = nn.RNN(WIDTH, 2, batch_first=True)

    def loss(x):
        weight = model.weight_ih_l0
        (slope,) = torch.autograd.grad(model(x)[0].square().mean(), weight, create_graph=True)
        (second,) = torch.autograd.grad(slope.square().sum(), weight, create_graph=True)
        return model(x)[1].sum() + second.square().sum()

    return script_of(loss, model)


def frozen_recurrent_layer():
    model = nn.ModuleDict({"layer": nn.LSTM(WIDTH, 2, batch_first=True), "head": nn.Linear(2, 3)})
    model["layer"].requires_grad_(False)

    def loss(x):
        points = x.detach().requires_grad_()
        scores = model["head"](model["layer"](points)[0])
        (slope,) = torch.autograd.grad(scores.sum(), points, create_graph=True)
        return scores.square().mean() + slope.square().mean()

    return script_of(loss, model)


def sparse_matrix_of_the_script():
    model, graph = nn.Linear(WIDTH, 2), (torch.rand(5, 5) < 0.5).double().to_sparse().coalesce()

    def change(_number):
        graph.values().mul_(1.5)

    script = script_of(lambda x: torch.sparse.mm(graph, model(x)).square().mean(), model, vectors)
    return Script(function=script.function, modules=script.modules, batches=script.batches, before_call=change)


def sparse_matrix_over_features():
    model, graph = nn.Linear(WIDTH, 2), torch.eye(2, dtype=torch.float64).to_sparse()
    return script_of(lambda x: torch.sparse.mm(graph, model(x).T).square().mean(), model, vectors)


def compressed_sparse_matrix():
    model, graph = nn.Linear(WIDTH, 2), torch.eye(5, dtype=torch.float64).to_sparse_csr()
    return script_of(lambda x: (graph @ model(x)).square().mean(), model, vectors)  # the line


def sparse_argument():
    model = nn.Linear(WIDTH, 2)

    def loss(x, graph):  # the line
        return F.relu(torch.sparse.mm(graph, model(x))).square().mean()

    return script_of(loss, model, lambda: (*vectors(), torch.eye(5, dtype=torch.float64).to_sparse()))


CASES = [
    AdversarialCase(build=gradient_of_a_sequence),
    AdversarialCase(build=gradient_of_a_recurrent_layer),
    AdversarialCase(build=gradients_of_samples),
    AdversarialCase(build=products_with_a_jacobian),
    AdversarialCase(build=second_derivatives),
    AdversarialCase(build=laplacian),
    AdversarialCase(build=changes_within_a_transform),
    AdversarialCase(build=column_changed_within_a_gradient, refused="as_strided"),
    AdversarialCase(build=penalty_of_a_recurrent_layer),
    AdversarialCase(build=step_within_a_job),
    AdversarialCase(build=third_derivative_of_a_recurrent_layer),
    AdversarialCase(build=frozen_recurrent_layer),
    AdversarialCase(build=sparse_matrix_of_the_script),
    AdversarialCase(build=sparse_matrix_over_features),
    AdversarialCase(build=compressed_sparse_matrix, refused="do not have strides"),
    AdversarialCase(build=sparse_argument, refused="argument graph is sparse"),
]

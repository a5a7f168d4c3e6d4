"""Complete jobs on two to seven ranks in one process: adversarial captures, placements and random numbers."""

import pytest
import torch
import torch.nn.functional as F
from simulated_ranks import assert_same_as_plain, run_on_simulated_ranks
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from rankless.errors import CaptureError
from rankless.user_code import display_name

CLASSES = 4


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(11)
    yield
    torch.set_default_dtype(torch.float32)


def encoder():
    model = nn.Sequential(
        nn.TransformerEncoderLayer(8, 2, 12, dropout=0.2, batch_first=True, activation="gelu"),
        nn.Flatten(0, 1),
        nn.BatchNorm1d(8),
        nn.Linear(8, CLASSES),
    )

    def loss(x, y):
        return F.cross_entropy(model(x), y.flatten(), ignore_index=0), x.mean()

    return loss, {"model": model}, lambda rows: [torch.randn(rows, 3, 8), torch.randint(0, CLASSES, (rows, 3))]


def pictures():
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Dropout2d(0.3),
        nn.Conv2d(4, 4, 3, groups=2, stride=2),
        nn.GroupNorm(2, 4),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.4, inplace=True),
        nn.Linear(16, CLASSES),
    )
    weights = torch.tensor([0.3, 1.0, 2.0, 0.7])

    def loss(x, y):
        return F.cross_entropy(model(x), y, weight=weights, label_smoothing=0.1)

    return loss, {"model": model}, lambda rows: [torch.randn(rows, 2, 6, 6), torch.randint(0, CLASSES, (rows,))]


def words():
    model = nn.ModuleDict({"table": nn.Embedding(9, 6, padding_idx=0), "inner": nn.LSTM(6, 5, 2, dropout=0.2)})
    model["outer"] = nn.Linear(5, 6)

    def loss(x):
        hidden, _ = model["inner"](model["table"](x).transpose(0, 1))
        out = model["outer"](hidden.transpose(0, 1)) @ model["table"].weight.t()
        return F.cross_entropy(out.transpose(1, 2), x, reduction="none", ignore_index=0).sum(1)

    return loss, {"model": model}, lambda rows: [torch.randint(0, 9, (rows, 4))]


@pytest.mark.ci_sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("build", [encoder, pictures, words])
@pytest.mark.parametrize("rows", [2, 3, 5, 8, 13])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_job_of_many_layers_is_exact_for_every_number_of_rows(build, rows, ranks):
    loss, modules, batch = build()
    assert_same_as_plain(loss, modules, batch(rows), ranks)


def features():
    return torch.randn(7, 6)


JOBS = {
    "checkpointed layers with dropout": lambda model: (
        lambda x: checkpoint(lambda y: F.dropout(model.inner(y).tanh(), 0.3), x, use_reentrant=False).square().mean()
    ),
    "dropout of nothing and of everything": lambda model: (
        lambda x: (F.dropout(model.inner(x), 0.0) + F.dropout(model.inner(x), 1.0)).square().mean()
    ),
    "noisy activations": lambda model: (
        lambda x: (F.rrelu(model.inner(x), training=True) + F.gumbel_softmax(model.inner(x))).square().mean()
    ),
    "hard choices": lambda model: lambda x: (F.gumbel_softmax(model.inner(x), hard=True) * x).square().mean(),
    "a result that nobody uses": lambda model: lambda x: (torch.rand(3), model.inner(x).square().mean())[1],
    "a view of an argument as a result": lambda model: lambda x: (model.inner(x).square().mean(), x.t(), x[:2], x),
    "results in a list with None": lambda model: lambda x: [model.inner(x).square().mean(), None, (model.inner(x) > 0)],
    "an argument that is no batch": lambda model: lambda x: (model.inner(x) * x[0] * x[:, :1].sum()).square().mean(),
    "in-place arithmetic": lambda model: (
        lambda x: model.inner(x).mul_(2).add_(x).clamp_(-1).square_().div_(3).mean() + (x * 1).fill_(2).sum() * 0
    ),
    "in-place writes of rows and columns": lambda model: (
        lambda x: model.inner(x).index_fill(0, torch.tensor([1, 4]), 0.5).masked_fill(x > 0, 0.1).square().mean()
    ),
    "writes into slices": lambda model: lambda x: write_slices(model.inner(x)).square().mean(),
    "a loop over the rows": lambda model: lambda x: sum(row.norm() for row in model.inner(x)) / len(x),
    "a matrix between rows": lambda model: lambda x: (torch.cdist(model.inner(x), x + 3) ** 2).softmax(1).diag().mean(),
    "products of the batch with itself": lambda model: (
        lambda x: torch.linalg.svdvals(model.inner(x).t() @ model.inner(x) + torch.eye(6)).square().mean()
    ),
    "a gradient by an argument": lambda model: lambda x: penalty(model.inner, x.detach().requires_grad_()),
    "a gradient by an argument of its own": lambda model: lambda x: penalty(model.inner, x.requires_grad_()),
    "a gradient by an intermediate value": lambda model: lambda x: penalty(model.inner, model.inner(x)),
    "a batch as another dim": lambda model: (
        lambda x: F.conv1d(model.inner(x).t()[None], torch.ones(2, 6, 3), padding=1).square().mean()
    ),
    "einsum over everything": lambda model: (
        lambda x: torch.einsum("bi,bj,ci->jc", x, model.inner(x), x).square().mean()
    ),
    "quantiles, cumulative sums and sorts of the batch": lambda model: (
        lambda x: (model.inner(x).cumsum(0).sort(0)[0] + model.inner(x).quantile(0.3, dim=0)).square().mean()
    ),
    "precision of its own": lambda model: lambda x: model.inner(x).float().sum(0).double().square().mean(),
    "a square root of a sum of squares": lambda model: lambda x: model.inner(x).square().sum().sqrt(),
    "differences of neighbours": lambda model: lambda x: (model.inner(x)[1:] - model.inner(x)[:-1]).square().mean(),
    "a step that reads a gradient": lambda model: (
        lambda x: torch.autograd.grad(model.inner(x).sin().sum(), model.inner.weight, create_graph=True)[0].norm()
    ),
}


def penalty(layer, x):
    (slope,) = torch.autograd.grad(layer(x).tanh().sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def write_slices(value):
    value = value.clone()
    value[:, 0] = value[:, 1] * 2
    value[2] = 1.0
    value[3:5] += value[:2]
    return value


@pytest.mark.ci_sample(4)
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.exhaustive), 7])
def test_a_job_is_exact_whatever_it_does_with_its_batch(name, ranks):
    model = nn.Module()
    model.inner = nn.Linear(6, 6)
    assert_same_as_plain(JOBS[name](model), {"model": model}, [features()], ranks, bound=BOUNDS.get(name, 1e-12))


BOUNDS = {"precision of its own": 1e-5}
"""A job that computes in float32 has the bound of float32."""


def parametrize_linear(parametrization):
    return lambda: parametrization(nn.Linear(6, 6))


@pytest.mark.ci_sample(4)
@pytest.mark.parametrize(
    "build",
    [
        parametrize_linear(parametrizations.weight_norm),
        parametrize_linear(parametrizations.spectral_norm),
        lambda: Twice(nn.Bilinear(6, 6, 3)),
        lambda: nn.PReLU(6),
        lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 2, 2), nn.InstanceNorm1d(2, affine=True)),
        lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Softmax2d(), nn.Conv1d(2, 4, 1)),
        lambda: nn.Sequential(nn.Unflatten(1, (1, 6)), nn.ConvTranspose1d(1, 2, 3), nn.LPPool1d(2, 2)),
        lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 1), nn.PixelShuffle(2), nn.Upsample((3, 5))),
        lambda: nn.Sequential(nn.Linear(6, 6), nn.GLU(), nn.Softshrink(), nn.Hardswish(), nn.CELU(), nn.Softsign()),
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Threshold(0.1, 2), nn.LogSoftmax(0), nn.Softmin(1)),
        lambda: nn.Sequential(nn.Unflatten(1, (6, 1)), nn.RNN(1, 3, nonlinearity="relu", batch_first=True), Second()),
    ],
)
@pytest.mark.parametrize("ranks", [3, 4])
def test_a_layer_is_exact(build, ranks):
    model = build()

    def loss(x):
        out = model(x)
        return (out * torch.arange(out.numel()).sin().view(out.shape)).sum()

    assert_same_as_plain(loss, {"model": model}, [features()], ranks)


class Twice(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x, x)


class Second(nn.Module):
    """Returns the final state of a recurrent layer, batch first."""

    def forward(self, results):
        return results[1].transpose(0, 1)


def test_tensors_that_are_not_a_batch_and_a_scalar_can_be_arguments():
    model = nn.Linear(6, CLASSES)

    def loss(x, y, weights, temperature):
        return F.cross_entropy(model(x) / temperature, y, weight=weights)

    arguments = [features(), torch.randint(0, CLASSES, (7,)), torch.rand(CLASSES), torch.tensor(2.0)]
    for ranks in (2, 3, 4):
        assert_same_as_plain(loss, {"model": model}, arguments, ranks)


def test_a_parameter_that_is_not_used_has_no_gradient():
    model = nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 2)])
    outcome = run_on_simulated_ranks(lambda x: model[0](x).square().mean(), {"model": model}, [features()], 3)
    assert set(outcome.gradients) == {"model.0.weight", "model.0.bias"}


def test_a_module_that_is_used_twice_keeps_its_tensors():
    shared = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
    model = nn.Sequential(shared, nn.Linear(6, 6), shared)
    tensors = [*model.parameters(), *model.buffers()]
    assert_same_as_plain(lambda x: model(x).square().mean(), {"model": model}, [features()], 3)
    assert all(now is before for now, before in zip([*model.parameters(), *model.buffers()], tensors, strict=True))


def test_a_module_tied_into_two_models_has_one_gradient():
    shared = nn.Linear(6, 6)
    first, second = nn.Sequential(shared, nn.Tanh()), nn.Sequential(nn.Linear(6, 6), shared)
    assert_same_as_plain(
        lambda x: second(first(x)).square().mean(), {"first": first, "second": second}, [features()], 3
    )


def test_a_batch_norm_that_averages_all_batches_is_one_program():
    model = nn.BatchNorm1d(6, momentum=None)
    assert_same_as_plain(lambda x: model(x).square().mean(), {"model": model}, [features()], 3)


def freeze(model):
    model.inner.weight.requires_grad = False


def freeze_all(model):
    model.requires_grad_(False)


def thaw(model):
    model.frozen.bias.requires_grad_()


@pytest.mark.parametrize("change", [freeze, freeze_all, thaw])
def test_a_job_that_sets_requires_grad_of_a_parameter_is_refused(change):
    model = nn.Module()
    model.inner, model.frozen = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)

    def loss(x):
        change(model)
        return model.frozen(model.inner(x)).square().mean()

    with pytest.raises(CaptureError, match="requires_grad") as raised:
        run_on_simulated_ranks(loss, {"model": model}, [features()], 2)
    assert raised.value.where.startswith(display_name(__file__))

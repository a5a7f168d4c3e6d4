"""Trainings that a strange reader found silently wrong, or crashing, on several workers; each as a script has it.

As a program it runs those that its arguments name, or all: as a job, and as plain PyTorch beside it. Rank 0 writes to
outcomes.json whether they are the same training, or which error refused the job. It runs with earlier versions, too.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training_comparison import Training, outcome

import rankless

ROWS, STEPS = 8, 3


def batches(*shape: int, count: int = STEPS, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor]]:
    return [(torch.randn(ROWS, *shape, dtype=dtype),) for _ in range(count)]


def trained(function: Callable[..., Any], model: nn.Module, given: Sequence[tuple[Any, ...]], **more: Any) -> Training:
    """Return a training with SGD."""
    model = model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Training(function=function, model=model, optimizer=optimizer, batches=given, **more)


class Parameters(nn.Module):
    """Parameters without layers."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


def channels_last_and_fused() -> Training:
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).double()
    model = layers.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    return Training(
        function=lambda x: model(x).square().mean(), model=model, optimizer=optimizer, batches=batches(3, 6, 6)
    )


def gradient_without_strides() -> Training:
    model = Parameters(w=(3, 2), v=(4,)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)

    def function(x: Tensor) -> Tensor:
        return (x @ model.w).square().mean() + model.v.sum()

    return Training(function=function, model=model, optimizer=optimizer, batches=batches(3))


def determinant_of_transposed_rows() -> Training:
    model = Parameters(w=(ROWS, ROWS))
    return trained(lambda x: torch.linalg.slogdet((x @ model.w).T)[1], model, batches(ROWS))


def numbers_in_transposed_memory() -> Training:
    model = Parameters(w=(3, 4))

    def function(x: Tensor) -> Tensor:
        hidden = x @ model.w
        return (hidden.T * torch.empty_like(hidden.T).bernoulli_(0.5)).square().mean()

    return trained(function, model, batches(3))


def tangent_of_linear() -> Training:
    model = nn.Linear(3, 4)

    def function(x: Tensor) -> Tensor:
        _, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
        return tangent.square().mean()

    return trained(function, model, batches(5, 3))


def tangent_of_lstm() -> Training:
    model = nn.LSTM(3, 4, batch_first=True)

    def function(x: Tensor) -> Tensor:
        _, tangent = torch.func.jvp(lambda item: model(item)[0], (x,), (torch.ones_like(x),))
        return tangent.square().mean()

    return trained(function, model, batches(5, 3))


def one_gradient_of_two_parameters_clipped() -> Training:
    model = Parameters(a=(4, 3), b=(4, 3))
    function: Callable[..., Any] = lambda x: F.linear(x, model.a + model.b).square().mean()  # noqa: E731
    return trained(function, model, batches(3), options={"clip_norm": 0.1})


def generator_restored_in_the_job() -> Training:
    model = nn.Linear(3, 2)

    def function(x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):  # refused here
            noise = torch.rand(2)
        return (model(x) * noise).square().mean()

    return trained(function, model, batches(3))


def margin_loss_with_padded_targets() -> Training:
    model = nn.Linear(3, 4)
    targets = torch.tensor([[1, 3, -1, 2], [0, -1, 2, 1]]).repeat(ROWS // 2, 1)
    given = [(x, targets) for (x,) in batches(3)]
    return trained(lambda x, y: F.multilabel_margin_loss(model(x), y), model, given)


def mean_in_half_precision() -> Training:
    return Training(function=lambda x: x.mean(), batches=[(torch.full((400, 400), 2.0, dtype=torch.float16),)])


def data_of_a_buffer() -> Training:
    model = nn.Linear(3, 2)
    model.register_buffer("average", torch.zeros(2))

    def function(x: Tensor) -> Tensor:
        out = model(x)
        model.average.data = 0.9 * model.average + 0.1 * out.detach().mean(0)
        return out.square().mean()

    return trained(function, model, batches(3))


def sum_of_booleans() -> Training:
    return Training(function=lambda x: (x > 0).sum(dtype=torch.bool) * torch.ones(()), batches=batches(3))


def variance_of_complex_numbers() -> Training:
    return Training(function=lambda x: x.var(), batches=batches(3, dtype=torch.complex128))


def training_with_complex_deviation() -> Training:
    model = nn.Linear(3, 2)
    return trained(lambda x: torch.complex(model(x), model(2 * x)).std(), model, batches(3))


def encoder_outside_the_job() -> Training:
    encoder, model = nn.Linear(3, 3).double(), nn.Linear(3, 2)
    given = [(encoder(x),) for (x,) in batches(3)]

    def function(x: Tensor) -> Tensor:  # refused here
        return model(x).square().mean()

    return trained(function, model, given, seen=lambda: [encoder.weight.grad])


def gradient_of_the_batch() -> Training:
    model = nn.Linear(3, 2)
    given = [(x.requires_grad_(),) for (x,) in batches(3)]

    def function(x: Tensor) -> Tensor:  # refused here
        return model(x).square().mean()

    return trained(function, model, given, seen=lambda: [x.grad for (x,) in given])


def parameter_as_an_argument() -> Training:
    model, scale = nn.Linear(3, 2), nn.Parameter(torch.ones(2, dtype=torch.float64))
    given = [(x, scale) for (x,) in batches(3)]

    def function(x: Tensor, factor: Tensor) -> Tensor:  # refused here
        return (model(x) * factor).square().mean()

    return trained(function, model, given, seen=lambda: [scale.grad])


def gradient_read_in_the_job() -> Training:
    model = nn.Linear(3, 2)

    def function(x: Tensor) -> Tensor:
        last = model.weight.grad  # refused here
        scale = torch.ones((), dtype=x.dtype) if last is None else 1 + last.norm()
        return model(x).square().mean() * scale

    return trained(function, model, batches(3))


def constants_read_as_numbers() -> Training:
    model, weights = nn.Linear(3, 2), torch.tensor([1.0, 2.0], dtype=torch.float64)

    def function(x: Tensor) -> Tensor:
        first, second = weights.tolist()  # refused here
        out = model(x).square().mean(0)
        return out[0] * first + out[1] * second

    return trained(function, model, batches(3), between=lambda: weights.mul_(3))


def gradients_kept_by_the_script() -> Training:
    model = nn.Linear(3, 2)
    kept: list[Tensor] = []
    return trained(
        lambda x: model(x).square().mean(),
        model,
        batches(3),
        between=lambda: kept.append(model.weight.grad),
        seen=lambda: kept,
    )


def rows_as_a_plain_number() -> Training:
    model = nn.Linear(3, 2)
    given = [(x, ROWS) for (x,) in batches(3, count=4)]
    return trained(
        lambda x, k: model(x).square().sum() / k,  # refused here
        model,
        given,
        options={"accumulate": 2},
    )


def weights_clipped_through_data() -> Training:
    model = nn.Linear(3, 2)

    def function(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.weight.data = model.weight.data.clamp(-0.2, 0.2)
        return loss

    return trained(function, model, batches(3))


def weights_clipped_in_place() -> Training:
    model = nn.Linear(3, 2)

    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            model.weight.clamp_(-0.2, 0.2)
        return model(x).square().mean()

    return trained(function, model, batches(3))


def embeddings_with_a_largest_norm() -> Training:
    model = nn.Embedding(6, 3, max_norm=0.5)
    return trained(lambda x: model(x).square().mean(), model, [(torch.randint(0, 6, (ROWS, 2)),) for _ in range(STEPS)])


def old_spectral_norm() -> Training:
    model = nn.utils.spectral_norm(nn.Linear(3, 2).double())
    return trained(lambda x: model(x).square().mean(), model, batches(3))


def penalty_clipped() -> Training:
    model = Parameters(w=(3, 2), v=(4, 2))
    function: Callable[..., Any] = lambda x: (x @ model.w).square().mean() + model.v.sum()  # noqa: E731
    return trained(function, model, batches(3), options={"clip_norm": 0.1})


def second_derivative_of_lstm() -> Training:
    model = nn.LSTM(3, 4, batch_first=True)

    def function(x: Tensor) -> Tensor:
        out = model(x)[0].square().mean()
        (slope,) = torch.autograd.grad(out, model.weight_ih_l0, create_graph=True)
        return out + slope.square().sum()

    return trained(function, model, batches(5, 3))


def sparse_matrix_of_the_script() -> Training:
    model, graph = nn.Linear(3, 2), torch.eye(2, dtype=torch.float64).to_sparse()
    return trained(lambda x: torch.sparse.mm(graph, model(x).T).square().mean(), model, batches(3))


def scripted_model() -> Training:
    model = torch.jit.trace(nn.Linear(3, 2).double(), torch.randn(2, 3, dtype=torch.float64))
    return trained(lambda x: model(x).square().mean(), model, batches(3))  # refused here


def slope_by_an_argument() -> Training:
    model = nn.Linear(3, 2).double()

    def function(x: Tensor) -> Tensor:
        with torch.enable_grad():
            points = x.requires_grad_()
            (slope,) = torch.autograd.grad(model(points).tanh().sum(), points)
        return slope

    return Training(function=function, model=model, batches=batches(3))


def jacobian_of_linear_in_prediction() -> Training:
    model = nn.Linear(3, 2).double()

    def function(x: Tensor) -> Tensor:
        return torch.func.jacfwd(lambda weight: F.linear(x, weight).square().mean())(model.weight)

    return Training(function=function, model=model, batches=batches(5, 3))


HOLES: dict[str, tuple[Callable[[], Training], ...]] = {
    "W1": (channels_last_and_fused, gradient_without_strides),
    "W2": (determinant_of_transposed_rows, numbers_in_transposed_memory),
    "W3": (tangent_of_linear, tangent_of_lstm),
    "W4": (one_gradient_of_two_parameters_clipped,),
    "W5": (generator_restored_in_the_job,),
    "W6": (margin_loss_with_padded_targets,),
    "W7": (mean_in_half_precision,),
    "W8": (data_of_a_buffer,),
    "W9": (sum_of_booleans,),
    "W10": (variance_of_complex_numbers,),
    "W11": (encoder_outside_the_job, gradient_of_the_batch, parameter_as_an_argument),
    "W12": (gradient_read_in_the_job,),
    "W13": (constants_read_as_numbers,),
    "W14": (gradients_kept_by_the_script,),
    "W15": (rows_as_a_plain_number,),
    "S10": (
        weights_clipped_through_data,
        weights_clipped_in_place,
        embeddings_with_a_largest_norm,
        old_spectral_norm,
    ),
    "crash": (
        penalty_clipped,
        second_derivative_of_lstm,
        training_with_complex_deviation,
        sparse_matrix_of_the_script,
        scripted_model,
        slope_by_an_argument,
        jacobian_of_linear_in_prediction,
    ),
}
"""By the id of the hole in the list of issue 21."""


def main() -> None:
    chosen = sys.argv[1:] or [build.__name__ for builds in HOLES.values() for build in builds]
    outcomes = {name: outcome(globals()[name]) for name in chosen}
    if rankless.rank() == 0:
        Path("outcomes.json").write_text(json.dumps(outcomes, indent=1))


if __name__ == "__main__":
    main()

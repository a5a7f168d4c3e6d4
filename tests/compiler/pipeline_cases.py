"""Models and jobs for tests of pipelines, and their comparison with plain PyTorch on one device."""

import contextlib
import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from simulated_pipelines import capture_job, read_states, run_on_simulated_pipeline
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rankless.compiler.ir.counter_operators import CounterRandomMode
from rankless.compiler.ir.logical_program import LogicalProgram

Job = Callable[..., Any]
Case = tuple[nn.Module, Job, list[Tensor]]  # a model, a job that takes it and the arguments, and the arguments

GENERATOR = torch.Generator(torch.get_default_device())


def run_plainly(case: Case, trains: bool) -> tuple[list[Tensor], dict[str, Tensor | None], dict[str, Tensor]]:
    """Return the loss and the results, the gradients and the buffers of a job on one device."""
    model, function, arguments = copy.deepcopy(case[0]), case[1], case[2]
    with torch.set_grad_enabled(trains):
        result = function(model, *arguments)
    results = [item.detach().clone() for item in pytree.tree_leaves(result) if isinstance(item, Tensor)]
    gradients: dict[str, Tensor | None] = {}
    if trains:
        loss = result["loss"] if isinstance(result, dict) else result[0] if isinstance(result, tuple) else result
        loss.mean().backward()
        results = [loss.detach().mean(), *results]
        gradients = {f"model.{name}": item.grad for name, item in model.named_parameters()}
    return results, gradients, {f"model.{name}": item.detach() for name, item in model.named_buffers()}


def capture_case(case: Case, trains: bool = True, **settings: Any) -> LogicalProgram:
    model, function, arguments = case
    return capture_job(lambda *tensors: function(model, *tensors), {"model": model}, arguments, trains, **settings)


def assert_same_as_plain(
    case: Case, options: Mapping[str, Any], *, trains: bool = True, counter: bool = False, **settings: Any
) -> None:
    """Assert that a pipeline gives the results, gradients, buffers and random numbers of plain PyTorch."""
    model, _, arguments = case
    generators = (torch.default_generator, GENERATOR)
    seed_all(generators)
    with CounterRandomMode() if counter else contextlib.nullcontext():
        results, gradients, buffers = run_plainly(case, trains)
    states = read_states(generators)
    seed_all(generators)
    before = {f"model.{name}": item.clone() for name, item in model.named_buffers()}
    program = capture_case(case, trains, draws_by_counter=counter, **settings)
    found = run_on_simulated_pipeline(program, {"model": model}, arguments, generators=generators, **options)
    assert len(found.results) == len(results)
    for number, (ours, plain) in enumerate(zip(found.results, results, strict=True)):
        assert_close(ours, plain, f"result {number}")
    for name, plain_gradient in gradients.items():
        ours_gradient = found.gradients.get(name)
        if plain_gradient is None:
            assert ours_gradient is None or not ours_gradient.any(), f"{name} has no gradient in plain PyTorch"
        else:
            assert ours_gradient is not None, f"{name} has no gradient"
            assert_close(ours_gradient, plain_gradient, f"the gradient of {name}")
    for name, plain in buffers.items():
        assert_close(found.mutations.get(name, before[name]), plain, name)
    assert all(map(torch.equal, found.random_states, states)), "the generators advanced differently"


def seed_all(generators: Sequence[torch.Generator]) -> None:
    for number, generator in enumerate(generators):
        generator.manual_seed(7 + number)


def assert_close(ours: Tensor, plain: Tensor, what: str) -> None:
    torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-12, equal_nan=True, msg=lambda text: f"{what}: {text}")


def chain(*sizes: int) -> nn.Sequential:
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def samples(*shape: int) -> Tensor:
    return torch.randn(*shape)


def labels(count: int, *shape: int) -> Tensor:
    return torch.randint(0, count, shape)


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


class TinyGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(17, 8), nn.Linear(8, 17, bias=False)
        self.head.weight = self.tokens.weight
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=True) for _ in range(2)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x, mask = self.tokens(ids), nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x).relu()
        second = self.layers[1](first).tanh()
        third = self.layers[0](second).tanh()  # the second call of a layer
        fourth = self.layers[2](third) + first
        return self.layers[4](self.layers[3](fourth).tanh() * second)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if number == 1:
                with torch.no_grad():
                    self.average.lerp_(x.mean(0), 0.1)
                    self.largest.copy_(torch.maximum(self.largest, x.abs().max()))
        return x * (1 + self.calls / 10)


def make_gpt() -> Case:
    ids = labels(17, 7, 5)
    return TinyGPT(), lambda m, i: F.cross_entropy(m(i).flatten(0, 1), i.flatten(), ignore_index=3), [ids]


def make_attention_without_dropout() -> Case:
    def job(model: nn.ModuleList, x: Tensor, y: Tensor) -> Tensor:
        for layer in model:
            query, key, value = layer(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(x.mean(1), y)

    return nn.ModuleList(nn.Linear(8, 24) for _ in range(4)), job, [samples(7, 3, 8), labels(8, 7)]


def make_skips() -> Case:
    return Skips(), classify, [samples(9, 6), labels(6, 9)]


def make_counting() -> Case:
    return Counting(), lambda m, x, y: (classify(m, x, y), m.average), [samples(9, 6), labels(6, 9)]


def make_results() -> Case:
    def job(model: nn.Sequential, x: Tensor, y: Tensor) -> dict[str, Any]:
        scores = model(x)
        losses = F.cross_entropy(scores, y, reduction="none")
        return {
            "loss": losses.mean() + 1e-2 * sum(item.norm() for item in model.parameters()),
            "losses": losses,
            "scores": [scores, scores.T, scores.argmax(1), scores.topk(2).values, scores.std(), scores[:, :0]],
            "arguments": (x, y, x.sum(0)),
            "weight": model[4].weight,
            "square": losses.mean() ** 2,
            "confusion": torch.zeros(16, dtype=torch.long).scatter_add(0, y * 4 + scores.argmax(1), y * 0 + 1),
        }

    return chain(6, 8, 8, 4), job, [samples(9, 6), labels(4, 9)]


def make_ignored() -> Case:
    y = labels(4, 9)
    y[:5] = -100

    def job(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, label_smoothing=0.1, weight=torch.tensor([1.0, 2.0, 3.0, 0.5]))

    return chain(6, 8, 8, 4), job, [samples(9, 6), y]


def make_penalty() -> Case:
    def job(model: nn.Sequential, real: Tensor, other: Tensor) -> Tensor:
        weight = torch.rand(real.shape[0], 1)
        between = (weight * real + (1 - weight) * other).requires_grad_(True)
        (gradient,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        return model(real).mean() - model(other).mean() + ((gradient.norm(2, dim=1) - 1) ** 2).mean()

    return chain(6, 8, 8, 1), job, [samples(9, 6), samples(9, 6)]


def make_channels_last() -> Case:
    model = nn.Sequential(
        *[nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Dropout2d(0.3), nn.Conv2d(4, 4, 3, padding=1)],
        *[nn.BatchNorm2d(4).eval(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)],
    ).to(memory_format=torch.channels_last)
    return model, classify, [samples(7, 4, 5, 5).to(memory_format=torch.channels_last), labels(3, 7)]


def make_recurrent() -> Case:
    model = nn.ModuleList([nn.Embedding(11, 6, padding_idx=0), nn.GRU(6, 5, 2, batch_first=True), nn.Linear(5, 4)])
    model[0].weight.requires_grad_(False)
    return (
        model,
        lambda m, x, y: F.cross_entropy(m[2](m[1](m[0](x))[0]).transpose(1, 2), y),
        [labels(11, 7, 5), labels(4, 7, 5)],
    )


def make_complex() -> Case:
    def job(model: nn.ModuleList, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.complex(model[0](x), model[1](x))
        for layer in model[2:]:
            z = layer(z) / 2
        return F.cross_entropy(z.abs() + z.conj().imag, y), z

    model = nn.ModuleList(nn.Linear(6, 6, dtype=dtype) for dtype in [torch.float64] * 2 + [torch.complex128] * 2)
    return model, job, [samples(9, 6), labels(6, 9)]


PLAIN = (make_gpt, make_attention_without_dropout, make_skips, make_counting, make_results, make_ignored, make_penalty)
LAYOUTS = (make_channels_last, make_recurrent, make_complex)

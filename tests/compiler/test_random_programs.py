"""Random programs on simulated ranks against one device: how rules, redistributions and strategies combine.

Hypothesis generates them from operators, modules, views, changes in place and random numbers, and shrinks one that
fails. The holes of the engine have lain between operators, not in them.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from simulated_ranks import assert_same_as_plain
from torch import Tensor, nn

SMALLEST = 1e-9
"""Entries below it are rounding, because the steps take and give numbers of about 1."""
BOUND = 1e-12
"""The allowed difference, relative to the largest entry."""
DISTURBANCE = 2e-15
"""The rounding of sums of a few terms, relative to each value."""
DISTURBED = 3
"""The number of runs with other rounding that show how much a program amplifies it."""
WIDTH = 4
"""The number of features of the modules."""

OPERATORS = {
    "turn": lambda x, _: x.t(),
    "gram": lambda x, _: x @ x.t() / x.shape[1],
    "gram of columns": lambda x, _: x.t() @ x / x.shape[0],
    "product with another": lambda x, o: x @ o.t() if o.shape[1] == x.shape[1] else x * 2,
    "outer": lambda x, o: x[:, :1] * o[:, 0][None, :],
    "softmax": lambda x, _: x.softmax(0) + x.log_softmax(1),
    "sum of rows": lambda x, _: x - x.sum(0, keepdim=True) / 3,
    "mean of columns": lambda x, _: x * x.mean(1, keepdim=True),
    "sum of all": lambda x, _: x + x.sum() * x.square().sum() / 50,
    "deviation": lambda x, _: (x - x.mean(0)) / (x.var(0, correction=0) + 1).sqrt(),
    "norm": lambda x, _: x / (x.norm() + 1),
    "largest": lambda x, _: x * x.amax(0) + x.amin(1, keepdim=True) - x.max(),
    "double rows": lambda x, _: torch.cat([x, x.sin()], 0) if x.shape[0] < 40 else x,
    "double columns": lambda x, _: torch.cat([x, x.cos()], 1) if x.shape[1] < 40 else x,
    "halve rows": lambda x, _: x[: max(1, x.shape[0] // 2)],
    "every other column": lambda x, _: x[:, ::2],
    "merge": lambda x, _: x.reshape(-1, 1),
    "flatten": lambda x, _: x.reshape(1, -1),
    "regroup": lambda x, _: x.reshape(2, -1) if x.numel() % 2 == 0 else x,
    "regroup columns": lambda x, _: (
        x.reshape(x.shape[0], 2, -1).transpose(1, 2).flatten(1) if x.shape[1] % 2 == 0 else x
    ),
    "dropout": lambda x, _: F.dropout(x, 0.3),
    "dropout across": lambda x, _: F.dropout(x.t(), 0.3).t(),
    "noise": lambda x, _: x + torch.randn_like(x) * 0.1,
    "layer norm": lambda x, _: F.layer_norm(x, x.shape[1:]),
    "batch norm": lambda x, _: F.batch_norm(x, None, None, training=True, eps=0.1) if x.shape[0] > 1 else x,
    "cumulative": lambda x, _: x.cumsum(0) / x.shape[0] + x.cumsum(1),
    "sort": lambda x, _: x.sort(0)[0] + x.sort(1)[0],
    "rows by index": lambda x, _: x[torch.arange(x.shape[0]) // 2],
    "columns by index": lambda x, _: x[:, torch.arange(x.shape[1] - 1, -1, -1)],
    "gather": lambda x, _: x.gather(1, x.argmax(1, keepdim=True)) + x,
    "where": lambda x, _: torch.where(x > x.mean() + 1e-6, x, x.square()),
    "pad": lambda x, _: F.pad(x, (1, 0, 0, 1)),
    "roll": lambda x, _: x.roll(1, 0),
    "mix": lambda x, o: x + o.sum(0).sum() / 10,
    "mix rows": lambda x, o: x * o[: x.shape[0], :1] if o.shape[0] >= x.shape[0] else x,
    "split and join": lambda x, _: torch.cat(x.chunk(2, 1)[::-1], 1),
    "stack": lambda x, _: torch.stack([x, x.exp()], 1).sum(1),
    "linear of three dims": lambda x, _: F.linear(x[:, None, :].expand(-1, 2, -1), x[:1]).flatten(1),
    "expand": lambda x, _: x[None].expand(2, -1, -1).mean(0),
    "entropy": lambda x, _: x * F.cross_entropy(x, torch.arange(x.shape[0]) % x.shape[1]),
    "detach": lambda x, _: x * x.detach(),
}


class Parts(nn.Module):
    """Modules that steps of a program call, all on rows of `WIDTH` features."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.layer_norm = nn.LayerNorm(WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH, eps=0.1)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.convolution = nn.Conv1d(1, 2, 3, padding=1)
        self.embedding = nn.Embedding(5, WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("average", torch.ones(WIDTH))


def fit(x: Tensor) -> Tensor:
    """Return rows of `WIDTH` features, repeated or cut off."""
    return x.repeat(1, -(-WIDTH // x.shape[1]))[:, :WIDTH]


def run_batch_norm(parts: Parts, x: Tensor) -> Tensor:
    return parts.batch_norm(fit(x)) if x.shape[0] > 1 else fit(x)


def run_convolution(parts: Parts, x: Tensor) -> Tensor:
    return parts.convolution(fit(x)[:, None]).flatten(1)


def run_embedding(parts: Parts, x: Tensor) -> Tensor:
    return fit(x) + parts.embedding((x[:, 0].detach() * 100).long().abs() % 5)


def update_average(parts: Parts, x: Tensor) -> Tensor:
    """Update a buffer, as an average of activations does, and use it."""
    with torch.no_grad():
        parts.average.mul_(0.9).add_(fit(x).detach().mean(0), alpha=0.1)
    return fit(x) * parts.average.clone()  # eager PyTorch refuses a second update of what a product has saved


MODULES = {
    "linear": lambda parts, x: parts.linear(fit(x)),
    "layer norm module": lambda parts, x: parts.layer_norm(fit(x)),
    "batch norm module": run_batch_norm,
    "attention": lambda parts, x: parts.attention(fit(x)[:, None], fit(x)[:, None], fit(x)[:, None])[0].flatten(1),
    "recurrent": lambda parts, x: parts.recurrent(fit(x)[:, None].expand(-1, 2, -1))[0].flatten(1),
    "convolution": run_convolution,
    "embedding": run_embedding,
    "dropout module": lambda parts, x: parts.dropout(x),
    "average": update_average,
}


def change(x: Tensor, dims: tuple[slice, ...], factor: float) -> Tensor:
    """Multiply a part of a copy in place."""
    changed = x.clone()
    changed[dims].mul_(factor)
    return changed


def assign(x: Tensor) -> Tensor:
    changed = x.clone()
    changed[:, 0] = changed[:, -1] * 2
    return changed


def add_through_view(x: Tensor, other: Tensor) -> Tensor:
    """Change a transposed view of a copy, which changes the copy."""
    changed = x.clone()
    changed.t().add_(other.mean())
    return changed


IN_PLACE = {
    "change rows": lambda x, _: change(x, (slice(1, None),), 0.5),
    "change columns": lambda x, _: change(x, (slice(None), slice(0, None, 2)), 1.5),
    "assign a column": lambda x, _: assign(x),
    "add through a view": add_through_view,
    "clamp": lambda x, _: x.clone().clamp_(-0.5, 0.5) + x.sign(),
    "relu": lambda x, _: (x * 2).relu_() - x,
    "fill": lambda x, _: x.masked_fill(x > 0.4, 0.3) + x.clone().zero_(),
    "noise in place": lambda x, _: (
        x + torch.empty_like(x).normal_() * 0.1 + torch.empty_like(x.t()).uniform_().t() * 0.1
    ),
}


@dataclass(frozen=True)
class RandomProgram:
    """The steps of a program, on a batch of `rows` and `columns`, and on so many ranks."""

    steps: tuple[str, ...]
    sources: tuple[int, ...]
    """For each step, which earlier value is its second operand."""
    rows: int
    columns: int
    ranks: int
    seed: int


STEPS = sorted([*OPERATORS, *MODULES, *IN_PLACE])


@st.composite
def programs(draw: st.DrawFn) -> RandomProgram:
    """Generate a program of 3 to 12 steps."""
    steps = tuple(draw(st.lists(st.sampled_from(STEPS), min_size=3, max_size=12)))
    return RandomProgram(
        steps=steps,
        sources=tuple(draw(st.integers(0, place)) for place in range(len(steps))),
        rows=draw(st.integers(4, 9)),
        columns=draw(st.sampled_from((3, 4, 6))),
        ranks=draw(st.integers(2, 4)),
        seed=draw(st.integers(0, 1000)),
    )


def run_apart(run: Callable[[], list[Tensor]], parts: Parts) -> list[Tensor]:
    """Run a function without a trace in buffers and random numbers."""
    buffers = copy.deepcopy(dict(parts.named_buffers()))
    with torch.random.fork_rng(devices=[]):
        values = run()
        with torch.no_grad():
            for name, buffer in parts.named_buffers():
                buffer.copy_(buffers[name])
    return values


def is_rounding(value: Tensor) -> bool:
    """Return whether an entry has been cancelled to rounding: its sign, and its ratio to others, say nothing."""
    return bool(((value != 0) & (value.abs() < SMALLEST)).any())


def disturb(value: Tensor, generator: torch.Generator) -> Tensor:
    """Return a value with other rounding, as a sum in another order has it."""
    return value * (1 + DISTURBANCE * (torch.rand(value.shape, generator=generator) - 0.5))


def amplifies_rounding(exact: Sequence[Tensor], disturbed: Sequence[Tensor]) -> bool:
    """Return whether rounding alone moves results of the plain program about as far as this test allows."""
    return any(
        bool(((one - other).abs().max() > BOUND / 2 * one.abs().max().clamp_min(1e-30)).item())
        for one, other in zip(exact, disturbed, strict=True)
        if one.numel()
    )


class PlainProgram:
    """A random program with its model and its batch."""

    def __init__(self, program: RandomProgram) -> None:
        torch.manual_seed(program.seed)
        self.program = program
        self.model, self.parts = nn.Linear(program.columns, program.columns), Parts()
        self.batch = torch.randn(program.rows, program.columns)

    def run(self, x: Tensor, change: Callable[[Tensor], Tensor] = lambda value: value) -> list[Tensor]:
        """Return the values of all steps, each changed by a function."""
        values = [change(self.model(x))]
        for name, source in zip(self.program.steps, self.program.sources, strict=True):
            if name in MODULES:
                value = MODULES[name](self.parts, values[-1])
            else:
                value = (OPERATORS | IN_PLACE)[name](values[-1], values[source])
            values.append(change(value.tanh()))
        return values

    def loss(self, x: Tensor, change: Callable[[Tensor], Tensor] = lambda value: value) -> tuple[Tensor, Tensor]:
        """Return the loss and the last value."""
        values = self.run(x, change)
        weights = torch.sin(torch.arange(1.0, values[-1].numel() + 1)).view(values[-1].shape)
        return (values[-1] * weights).sum() + values[0].square().mean(), values[-1]

    def compute(self, change: Callable[[Tensor], Tensor] = lambda value: value) -> list[Tensor]:
        """Return loss, last value and all gradients as one vector, as plain PyTorch computes them."""
        loss, last = self.loss(self.batch, change)
        parameters = [*self.model.parameters(), *self.parts.parameters()]
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        return [
            loss.detach(),
            last.detach(),
            torch.cat([grad.to_dense().reshape(-1) for grad in grads if grad is not None]),
        ]

    def is_decidable(self) -> bool:
        """Return whether rounding stays far below what the test allows."""
        values = run_apart(lambda: self.run(self.batch), self.parts)
        if any(map(is_rounding, values)):
            return False
        exact = run_apart(self.compute, self.parts)
        generator = torch.Generator(torch.get_default_device()).manual_seed(self.program.seed)
        for _ in range(DISTURBED):
            disturbed = run_apart(lambda: self.compute(lambda value: disturb(value, generator)), self.parts)
            if amplifies_rounding(exact, disturbed):
                return False
        return True


def check(program: RandomProgram) -> None:
    """Assert that a program on simulated ranks equals the plain one."""
    torch.set_default_dtype(torch.float64)
    try:
        plain = PlainProgram(program)
        assume(plain.is_decidable())
        modules = {"model": plain.model, "parts": plain.parts}
        assert_same_as_plain(lambda x: plain.loss(x), modules, [plain.batch], program.ranks, BOUND)
    finally:
        torch.set_default_dtype(torch.float32)


QUIET = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)


@settings(QUIET, max_examples=15, derandomize=True)
@given(programs())
def test_a_random_program_is_exact(program: RandomProgram):
    check(program)


@pytest.mark.exhaustive
@settings(QUIET, max_examples=1000)
@given(programs())
def test_a_thousand_random_programs_are_exact(program: RandomProgram):
    check(program)

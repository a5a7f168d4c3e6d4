"""Random operators by counter: the numbers of one device, bit for bit, on any number of simulated ranks."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from simulated_ranks import Outcome, run_on_simulated_ranks, run_source_on_simulated_ranks
from support.devices import get_random_state
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rankless.compiler.capture.capture import JobSource, run_compiled_functions_eagerly
from rankless.compiler.ir.counter_distributions import draw, draw_key
from rankless.compiler.ir.counter_operators import CounterRandomMode, find_reader
from rankless.compiler.rule_table import SHARDING_RULES

aten = torch.ops.aten
RANKS = (1, 2, 3, 4)


def run_plainly(function: Callable[..., Any], arguments: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors of a job's result on one device."""
    with run_compiled_functions_eagerly(), CounterRandomMode(), torch.no_grad():
        result = function(*arguments)
    return [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def run_on_ranks(function: Callable[..., Any], arguments: Sequence[Tensor], ranks: int) -> Outcome:
    source = JobSource(name="job", function=function, modules={}, trains=False, draws_by_counter=True)
    return run_source_on_simulated_ranks(source, arguments, ranks)


def assert_same_numbers(function: Callable[..., Any], arguments: Sequence[Tensor], ranks: int, seed: int = 3) -> None:
    """Assert that results and the generator's state are those of one device, bit for bit."""
    torch.manual_seed(seed)
    wanted = run_plainly(function, arguments)
    state = get_random_state()
    torch.manual_seed(seed)
    found = run_on_ranks(function, arguments, ranks).results
    assert torch.equal(get_random_state(), state), "the generator advanced differently"
    assert len(found) == len(wanted)
    for ours, plain in zip(found, wanted, strict=True):
        assert ours.dtype == plain.dtype
        assert torch.equal(ours, plain)
        if plain.numel() > 1:
            assert plain.unique().numel() > 1, "a constant result shows nothing"


def ratio(x: Tensor) -> Tensor:
    return x.abs() / (x.abs().amax() + 1)


DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.3) != 0,
    "dropout in place": lambda x: F.dropout(x * 1, 0.3, inplace=True) != 0,
    "dropout of channels": lambda x: F.dropout2d(x[:, :, None, None].expand(-1, -1, 2, 2), 0.5),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.4, True),
    "feature alpha dropout": lambda x: F.feature_alpha_dropout(x[:, :, None], 0.4, True),
    "bernoulli of probabilities": lambda x: torch.bernoulli(ratio(x)),
    "bernoulli in place": lambda x: torch.empty_like(x).bernoulli_(0.2),
    "bernoulli in place of probabilities": lambda x: torch.empty_like(x).bernoulli_(ratio(x)),
    "bernoulli in place of broadcast probabilities": lambda x: torch.empty_like(x).bernoulli_(ratio(x[:1])),
    "rand": lambda x: torch.rand(*x.shape, dtype=x.dtype) + 0 * x,
    "rand alone": lambda x: (torch.rand(5, 3), torch.rand(x.shape[0])),
    "rand_like": lambda x: torch.rand_like(x),
    "rand_like of another dtype": lambda x: torch.rand_like(x, dtype=torch.float64),
    "uniform": lambda x: torch.empty_like(x).uniform_(-2, 5),
    "randn": lambda x: torch.randn(x.shape[0], 7) * x.sum(1, keepdim=True).sign(),
    "randn_like": lambda x: torch.randn_like(x),
    "complex randn": lambda x: torch.view_as_real(torch.randn(x.shape[0], 3, dtype=torch.complex64)),
    "normal": lambda x: torch.empty_like(x).normal_(1, 3),
    "normal of means": lambda x: torch.normal(x, 2.0) > x,
    "normal of deviations": lambda x: torch.normal(0.0, x.abs()) > 0,
    "normal of both": lambda x: torch.normal(x, x.abs()) > x,
    "normal of numbers": lambda x: torch.normal(1.0, 2.0, (x.shape[0], 3)) + 0 * x[:, :1],
    "randint": lambda x: torch.randint(100, (x.shape[0], 2)) + torch.randint(-5, 5, (x.shape[0], 1)),
    "randint_like": lambda x: torch.randint_like(x, 3, 90),
    "random": lambda x: torch.empty(x.shape, dtype=torch.int64).random_(),
    "random below": lambda x: torch.empty_like(x).random_(200) + x.sign(),
    "random bytes": lambda x: torch.empty_like(x, dtype=torch.uint8).random_(),
    "exponential": lambda x: torch.empty_like(x).exponential_(2.0),
    "gumbel softmax": lambda x: F.gumbel_softmax(x, hard=True),
    "geometric": lambda x: torch.empty_like(x).geometric_(0.1),
    "cauchy": lambda x: torch.empty_like(x).cauchy_(1, 2),
    "log normal": lambda x: torch.empty_like(x).log_normal_(0.1, 0.5),
    "distributions": lambda x: torch.distributions.Normal(x, 1.0, validate_args=False).rsample() > x,
    "of the generator between": lambda x: (torch.rand_like(x), torch.randperm(20), torch.rand_like(x)),
    "unused": lambda x: (torch.rand_like(x), torch.rand_like(x))[1],
    "without elements": lambda x: (F.dropout(x[:, :0]).sum(), F.dropout(x, 1.0).sum(), torch.rand_like(x)),
    "of a part in place": lambda x: (y := torch.zeros_like(x), y[:, 1:3].uniform_(), y)[2],
    "a checkpointed pass": lambda x: checkpoint(lambda y: F.dropout(y, 0.5), x, use_reentrant=False),
}


@pytest.mark.ci_sample(8)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", DRAWS)
def test_ranks_draw_the_numbers_of_one_device(name, ranks):
    assert_same_numbers(DRAWS[name], [torch.sin(torch.arange(1.0, 36)).view(7, 5)], ranks)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, 1),
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "another order": lambda x: x.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0),
    "split on the last dim": lambda x: x.movedim(0, -1),
    "split in the middle": lambda x: x.movedim(0, 2),
    "expanded": lambda x: x[:, :1].expand(-1, 4, -1, -1),
}


@pytest.mark.ci_sample(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_numbers_depend_on_the_logical_place_and_not_on_memory(name, dtype):
    x = torch.sin(torch.arange(1.0, 253)).view(7, 4, 3, 3).to(dtype)

    def draws(value: Tensor) -> tuple[Tensor, ...]:
        return F.dropout(value, 0.5) != 0, torch.rand_like(value), torch.empty_like(value).normal_()

    for ranks in (2, 3):
        assert_same_numbers(lambda value: draws(LAYOUTS[name](value)), [x], ranks)
    torch.manual_seed(0)
    laid_out = run_plainly(draws, [LAYOUTS[name](x)])
    torch.manual_seed(0)
    contiguous = run_plainly(draws, [LAYOUTS[name](x).contiguous()])
    assert all(map(torch.equal, laid_out, contiguous))
    for drawn in laid_out[1:]:
        assert drawn.stride() == torch.empty_like(LAYOUTS[name](x)).stride()


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_draws_only_its_elements(ranks, monkeypatch):
    drawn = []

    def count(key, distribution, parameters, value, parts, order=None):
        result = draw(key, distribution, parameters, value, parts, order)
        drawn.append(result.numel())
        return result

    monkeypatch.setattr("rankless.compiler.ir.counter_distributions.draw", count)
    monkeypatch.setattr("rankless.compiler.ir.counter_operators.draw", count)
    run_on_ranks(
        lambda x: F.dropout(x, 0.5) + torch.rand_like(x) + torch.randn(*x.shape) * torch.bernoulli(ratio(x)),
        [torch.rand(7, 5)],
        ranks,
    )
    assert sum(drawn) == 4 * 35


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", ["attention", "lstm", "encoder"])
@pytest.mark.ci_sample(2)
def test_layers_with_dropout_inside_are_those_of_one_device(kind, ranks):
    torch.manual_seed(0)
    if kind == "attention":
        layer: nn.Module = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True).double()
        function = lambda x: layer(x, x, x)[0]  # noqa: E731
    elif kind == "lstm":
        layer = nn.LSTM(8, 4, 3, dropout=0.4, batch_first=True, bidirectional=True).double()
        function = lambda x: layer(x)[0]  # noqa: E731
    else:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.4, batch_first=True).double()
        function = layer
    x = torch.randn(7, 5, 8, dtype=torch.float64)
    torch.manual_seed(1)
    wanted = train_plainly(lambda value: function(value).square().mean(), layer, x)
    torch.manual_seed(1)
    source = JobSource(
        name="job",
        function=lambda value: function(value).square().mean(),
        modules={"model": layer},
        trains=True,
        draws_by_counter=True,
    )
    found = run_source_on_simulated_ranks(source, [x], ranks)
    torch.testing.assert_close(found.results[0], wanted[0], rtol=1e-12, atol=0)
    for (name, _), gradient in zip(layer.named_parameters(), wanted[1:], strict=True):
        torch.testing.assert_close(found.gradients[f"model.{name}"], gradient, rtol=1e-9, atol=1e-14)


def train_plainly(function: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor) -> list[Tensor]:
    """Return loss and gradients on one device."""
    with CounterRandomMode():
        loss = function(x)
        return [loss.detach(), *torch.autograd.grad(loss, list(layer.parameters()))]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_pass_computed_again_draws_the_numbers_of_the_first(reentrant):
    weight = torch.ones(1000, dtype=torch.float64, requires_grad=True)

    def loss(apply: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        torch.manual_seed(4)
        with CounterRandomMode():
            first = apply(lambda value: F.dropout(value, 0.5).sin(), weight)
            second = apply(lambda value: (value * torch.randn(1000, dtype=torch.float64)).square(), first)
            (gradient,) = torch.autograd.grad(second.sum(), weight) if not reentrant else (None,)
            if reentrant:
                weight.grad = None
                second.sum().backward()
                gradient = weight.grad.clone()
            return gradient, torch.rand(3)

    plain = loss(lambda function, value: function(value))
    again = loss(functools.partial(checkpoint, use_reentrant=reentrant))
    assert torch.equal(plain[0], again[0])
    assert torch.equal(plain[1], again[1])


def test_every_operator_with_a_rule_is_drawn_by_counter_or_listed_as_whole():
    by_generator = {"randperm", "multinomial", "poisson", "native_dropout"}
    random = {item for item in SHARDING_RULES if torch.Tag.nondeterministic_seeded in item.tags}
    names = {item._schema.name.removeprefix("aten::") for item in random if find_reader(item) is None}
    attention = {name for name in names if "attention" in name}
    assert names - attention == by_generator


def test_a_seed_decides_the_keys_and_an_empty_operator_takes_none():
    torch.manual_seed(0)
    keys = [draw_key((3,)), draw_key((0, 4)), draw_key(())]
    assert keys[1] == 0
    assert len({*keys}) == 3
    torch.manual_seed(0)
    assert keys == [draw_key((1, 2)), draw_key((2, 0)), draw_key((5,))]


@pytest.mark.parametrize(
    ("draw_wrongly", "expected"),
    [
        (lambda: torch.empty(3).bernoulli_(1.5), "a probability from 0 to 1, not 1.5"),
        (lambda: torch.bernoulli(torch.tensor([0.5, float("nan")])), "probabilities from 0 to 1"),
        (lambda: torch.normal(0.0, torch.tensor([-1.0])), "standard deviations from 0 up"),
        (lambda: torch.empty(3).normal_(0, -1), "a standard deviation from 0 up, not -1"),
        (lambda: torch.empty(3).uniform_(1, 0), "a range, not from 1.0 to 0.0"),
        (lambda: torch.randint(3, 3, (2,)), "of which there are none"),
        (lambda: torch.empty(3).exponential_(-1), "a rate above 0"),
        (lambda: torch.empty(3).geometric_(0), "a probability above 0 and below 1"),
        (lambda: torch.empty(3).cauchy_(0, 0), "a scale above 0"),
        (lambda: torch.empty(3).log_normal_(0, 0), "a standard deviation above 0"),
    ],
)
def test_parameters_that_pytorch_refuses_are_refused(draw_wrongly, expected):
    with pytest.raises(RuntimeError):
        draw_wrongly()
    with CounterRandomMode(), pytest.raises(RuntimeError, match=expected):
        draw_wrongly()


def test_a_generator_of_the_script_and_out_arguments_work_on_one_device():
    generator = torch.Generator(torch.get_default_device()).manual_seed(5)
    wanted = torch.rand(4, generator=torch.Generator(torch.get_default_device()).manual_seed(5))
    with CounterRandomMode():
        assert torch.equal(torch.rand(4, generator=generator), wanted)
        out = torch.empty(0)
        assert torch.randn(3, 2, out=out) is out
        assert out.shape == (3, 2)
        assert torch.rand(3, device="meta").is_meta


def test_capture_marks_random_operators_only_if_the_job_says_so():
    def job(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    assert "by counter" in run_on_ranks(job, [torch.ones(4, 2)], 2).sharded.logical.text()
    plain = run_on_simulated_ranks(job, {}, [torch.ones(4, 2)], 2, trains=False)
    assert "by counter" not in plain.sharded.logical.text()

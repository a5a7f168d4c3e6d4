"""Pipelines: stages and microbatches in one process give the results of plain PyTorch on one device."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline_cases import (
    GENERATOR,
    LAYOUTS,
    PLAIN,
    Case,
    Job,
    assert_same_as_plain,
    capture_case,
    chain,
    classify,
    labels,
    make_gpt,
    make_results,
    samples,
)
from simulated_pipelines import cut, run_on_simulated_pipeline, split_workers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rankless.compiler.lowering.value_check import OtherValueRead
from rankless.errors import CaptureError

FEW: tuple[dict[str, Any], ...] = ({"workers": 2, "microbatches": 3},)
ALL: tuple[dict[str, Any], ...] = (
    *FEW,
    {"workers": 2, "microbatches": 1, "schedule": "gpipe"},
    {"workers": 3, "microbatches": 2, "schedule": "interleaved"},
    {"workers": 3, "microbatches": 4, "schedule": "zero-bubble"},
    {"workers": 4, "microbatches": 5, "schedule": "gpipe", "divided": False},
)
KINDS: tuple[dict[str, Any], ...] = (
    {"workers": 5, "microbatches": 6, "stage_workers": split_workers((3, 2))},
    {"workers": 4, "microbatches": 2, "stage_workers": split_workers((1, 3))},
    {"workers": 5, "microbatches": 7, "stage_workers": split_workers((4, 1)), "schedule": "gpipe"},
    {
        "workers": 6,
        "microbatches": 4,
        "stage_workers": split_workers((2, 1, 3)),
        "schedule": "zero-bubble",
        "divided": False,
    },
)
"""Several workers for a stage, as of workers of several kinds."""


@pytest.fixture(autouse=True)
def _float64() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    yield
    torch.set_default_dtype(before)


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize("make", PLAIN + LAYOUTS, ids=lambda make: make.__name__)
def test_a_pipeline_trains_as_plain_pytorch_does(make: Callable[[], Case]) -> None:
    for options in FEW if make is make_gpt else ALL[:1] + ALL[2:3]:
        assert_same_as_plain(make(), options)


@pytest.mark.parametrize("options", ALL, ids=str)
@pytest.mark.ci_sample(2)
def test_every_schedule_gives_the_same(options: Mapping[str, Any]) -> None:
    assert_same_as_plain(make_results(), options)
    assert_same_as_plain(make_results(), options, trains=False)


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("make", PLAIN + LAYOUTS, ids=lambda make: make.__name__)
def test_workers_of_a_stage_that_take_turns_give_the_same(make: Callable[[], Case], options: Mapping[str, Any]) -> None:
    assert_same_as_plain(make(), options)


@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.ci_sample(2)
def test_workers_that_take_turns_predict_the_same(options: Mapping[str, Any]) -> None:
    assert_same_as_plain(make_results(), options, trains=False)


def mix(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
    part, order = torch.distributions.Beta(0.4, 0.4).sample(), torch.randperm(x.shape[0])
    scores = model(part * x + (1 - part) * x[order])
    return part * F.cross_entropy(scores, y) + (1 - part) * F.cross_entropy(scores, y[order])


def drop(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
    x = F.dropout(model[0](x), 0.3) * torch.rand(x.shape[0], 1, generator=GENERATOR)
    x = F.alpha_dropout(x + torch.randn_like(x), 0.2, training=True)
    return F.cross_entropy(model[2:](x * torch.rand(x.shape[1])), y)


def mask(model: nn.Sequential, x: Tensor, _: Tensor) -> Tensor:
    hidden = torch.bernoulli(torch.full(x.shape, 0.4))
    return ((model(x * (1 - hidden))[:, :1] - x) ** 2 * hidden).sum() / hidden.sum()


def sample_by_value(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
    x = model[0](x).sigmoid()
    return F.cross_entropy(model[2:](x * torch.bernoulli(x.detach())), y)


def draw_per_sample(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model[2:](model[0](x) * torch.rand(x.shape[0], 1)) * torch.rand(4), y)


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize("job", [mix, drop, mask], ids=lambda job: job.__name__)
@pytest.mark.parametrize("options", ALL[:3] + KINDS[:2], ids=str)
def test_a_pipeline_draws_the_numbers_of_one_device(job: Job, options: Mapping[str, Any]) -> None:
    assert_same_as_plain((chain(6, 8, 8, 4), job, [samples(9, 6), labels(4, 9)]), options)


@pytest.mark.ci_sample(4)
@pytest.mark.parametrize("job", [sample_by_value, draw_per_sample], ids=lambda job: job.__name__)
@pytest.mark.parametrize("options", ALL[:3] + KINDS[:2], ids=str)
def test_a_pipeline_draws_by_counter(job: Job, options: Mapping[str, Any]) -> None:
    assert_same_as_plain((chain(6, 8, 8, 4), job, [samples(9, 6), labels(4, 9)]), options, counter=True)


def train_with_checkpoints(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
    for layer in model[:3]:
        x = checkpoint(lambda value, layer=layer: F.dropout(layer(value), 0.3).tanh(), x, use_reentrant=False)
    return F.cross_entropy(model[3](x), y)


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("counter", [False, True])
@pytest.mark.parametrize("options", ALL[:1] + ALL[2:], ids=str)
def test_a_pipeline_recomputes_checkpoints(options: Mapping[str, Any], counter: bool) -> None:
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
    assert_same_as_plain((model, train_with_checkpoints, [samples(9, 6), labels(6, 9)]), options, counter=counter)


@pytest.mark.parametrize("options", ALL[:1] + ALL[2:], ids=str)
@pytest.mark.ci_sample(2)
def test_a_pipeline_recomputes_blocks_whatever_the_sizes_of_microbatches(options: Mapping[str, Any]) -> None:
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.GELU()) for _ in range(6)])
    assert_same_as_plain((blocks, classify, [samples(9, 6), labels(6, 9)]), options, recompute=1.0)
    model, job, arguments = chain(6, 8, 8, 4), classify, [samples(9, 6), labels(4, 9)]
    penalized = (model, lambda m, x, y: job(m, x, y) + sum((p**2).sum() for p in m.parameters()), arguments)
    assert_same_as_plain(penalized, options, recompute=1.0)


def test_a_batch_of_one_sample_can_be_trained() -> None:
    assert_same_as_plain((chain(6, 8, 8, 4), classify, [samples(1, 6), labels(4, 1)]), ALL[1])


def test_microbatches_divide_any_dim_and_leave_other_arguments_whole() -> None:
    def job(model: nn.Module, x: Tensor, y: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return F.cross_entropy(model(x).mean(0) * scale, y, weight=weight)

    case: Case = (chain(6, 8, 8, 4), job, [samples(3, 7, 6), labels(4, 7), torch.rand(4), torch.tensor(1.7)])
    assert_same_as_plain(case, {**ALL[0], "batch_dims": (1, 0, None, None)})
    assert_same_as_plain(case, {**ALL[0], "batch_dims": (1, None, 0, None)})


def read_argument(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x * 2 if x.sum() > -1e9 else x), y)


def read_score(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    scores = model(x)
    return F.cross_entropy(scores if scores.isfinite().all() else scores * 0, y)


@pytest.mark.parametrize("job", [read_argument, read_score])
def test_every_worker_compares_values_that_python_reads(job: Job) -> None:
    case: Case = (chain(6, 8, 8, 4), job, [samples(9, 6), labels(4, 9)])
    assert_same_as_plain(case, ALL[0], reads=[True])
    program = capture_case(case, reads=[False])
    with pytest.raises(OtherValueRead):
        run_on_simulated_pipeline(program, {"model": case[0]}, case[2], **ALL[0])


class Contrastive(nn.Module):
    """A model that compares each sample with all others in its own forward, as CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.scale = chain(6, 8, 8, 4), chain(6, 8, 4), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        similarity = F.normalize(self.first(x)) @ F.normalize(self.second(x)).T * self.scale.exp()
        return F.cross_entropy(similarity, torch.arange(len(x)))


@pytest.mark.parametrize(
    ("model", "job", "found"),
    [
        (lambda: chain(6, 8, 8, 4), sample_by_value, "random='counter'"),
        (lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)), classify, "BatchNorm1d"),
        (lambda: chain(6, 8, 8, 4), lambda m, x, y: F.cross_entropy(m(x), y).sqrt(), "sqrt"),
        (
            lambda: Contrastive(),
            lambda m, x, _: m(x),
            r"the loss: mm of model \(Contrastive\), which needs the whole batch",
        ),
    ],
)
def test_what_would_stop_the_pipeline_is_refused(model: Callable[[], nn.Module], job: Job, found: str) -> None:
    case: Case = (model(), job, [samples(9, 6), labels(4, 9)])
    with pytest.raises(CaptureError, match=found):
        run_on_simulated_pipeline(capture_case(case), {"model": case[0]}, case[2], **ALL[0])


def test_equal_blocks_are_cut_into_equal_stages() -> None:
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(12)])
    program = capture_case((blocks, lambda m, x: m(x).square().mean(), [samples(16, 32)]))
    for count, borders in ((2, (6,)), (3, (4, 8)), (4, (3, 6, 9))):
        assert cut(program, {"model": blocks}, count).borders == tuple(f"model.{number}" for number in borders)


def test_each_value_is_sent_once_and_a_second_job_follows_the_stages_of_the_first() -> None:
    model, job, arguments = make_gpt()
    model.eval()
    found = run_on_simulated_pipeline(capture_case((model, job, arguments)), {"model": model}, arguments, **ALL[0])
    activations, weight, losses = 7 * 5 * 8 * 8, 17 * 8 * 8, 8
    assert found.sent_bytes == [activations + weight, activations + weight + losses]

    def predict(model: nn.Module, ids: Tensor) -> Tensor:
        return model(ids).argmax(-1)

    program = capture_case((model, predict, arguments), trains=False)
    stages = cut(program, {"model": model}, 2, found.stages.owners)
    assert (stages.borders, stages.owners) == (found.stages.borders, found.stages.owners)
    predicted = run_on_simulated_pipeline(program, {"model": model}, arguments, owners=found.stages.owners, **ALL[0])
    assert torch.equal(predicted.results[0], predict(model, *arguments))
    assert predicted.sent_bytes == [activations + weight, 7 * 5 * 8]

"""Every loss of PyTorch, and losses as scripts write them, over several calls against one plain step on all rows."""

import pytest
import torch
import torch.nn.functional as F
from accumulated_loss_cases import FUNCTIONS, REDUCTIONS, WRITTEN
from accumulation_check import Script, assert_accumulated
from torch import nn

from rankless.context.world import World
from rankless.errors import CaptureError, StepError
from rankless.jobs.job import make_job
from rankless.jobs.job_definition import StepOptions
from rankless.parallel.mesh import Mesh

pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
GROUPS = ((7, 5), (4,))
OFTEN = ("masked_by_index", "masked_over_read_count", "weighted_samples_normalized")
"""Losses that CI always accumulates on two workers."""


class Case:
    """Builds the script of one loss, in the process that runs it."""

    def __init__(self, name, reduction=None):
        self.name, self.reduction = name, reduction

    def __repr__(self):
        return self.name if self.reduction is None else f"{self.name}, {self.reduction}"

    def __call__(self):
        if self.reduction is None:
            batch, loss = next(
                (batch, item) for batch, items in WRITTEN.items() for item in items if item.__name__ == self.name
            )
        else:
            batch, function = FUNCTIONS[self.name]

            def loss(out, *rest):
                return function(out, *rest, self.reduction)

        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
        return Script(
            modules={"model": model},
            loss=lambda x, *rest: loss(model(x), *rest),
            batch=lambda rows: (torch.randn(rows, 5), *batch(rows)),
            rate=0.005,
        )


FROM_TORCH = [Case(name, reduction) for name in FUNCTIONS for reduction in REDUCTIONS]
FROM_TORCH += [Case(name, "batchmean") for name in FUNCTIONS if name.startswith("kl_div")]
FROM_SCRIPTS = [Case(loss.__name__) for losses in WRITTEN.values() for loss in losses]


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("workers", [2, 1])
@pytest.mark.parametrize("case", FROM_TORCH, ids=repr)
def test_losses_of_torch_accumulate_over_calls(case, workers):
    assert_accumulated(case, workers, torch.float64, GROUPS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("case", FROM_SCRIPTS, ids=repr)
def test_losses_of_scripts_accumulate_over_calls(case, workers):
    assert_accumulated(case, workers, torch.float64, GROUPS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OFTEN)
def test_losses_over_selected_rows_and_counts_accumulate_on_workers(name):
    assert_accumulated(Case(name), 2, torch.float64, GROUPS)


def random_masks():
    """A mean over masks that the job draws, after a dropout that draws too, as of masked language models."""
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Linear(8, 4))

    def parts(x):
        error, mask = model(x).square(), torch.rand(len(x), 4) < 0.4
        return (error * mask).sum(), mask.sum()

    def loss(x):
        total, count = parts(x)
        return total / count

    def together(group):
        totals, counts = zip(*[parts(x) for (x,) in group], strict=True)
        return sum(totals) / sum(counts)

    batch = lambda rows: (torch.randn(rows, 5),)  # noqa: E731
    return Script(modules={"model": model}, loss=loss, batch=batch, together=together)


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [1, 2])
def test_a_mean_over_a_mask_that_the_job_draws_accumulates(workers):
    assert_accumulated(random_masks, workers, torch.float64, GROUPS)


def accumulate(loss, *batches):
    """Return the parameters before and after two calls that make one step, on one device."""
    torch.manual_seed(1)
    model = nn.Linear(3, 1).double()
    world = World(mesh=Mesh.solo(), notify=lambda _: None, send_record=lambda _: None)
    job = make_job(
        lambda x: loss(model(x), x),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        view="consistent",
        world=lambda: world,
        step_options=StepOptions(accumulate=2),
    )
    for batch in batches:
        job(batch)


@pytest.mark.parametrize("read", [lambda x: x.max().item(), lambda x: x.mean().item(), lambda x: len(x[x > 0]) ** 2])
@pytest.mark.ci_sample(1)
def test_a_loss_with_another_value_of_the_whole_batch_is_refused(read):
    """A call does not know the value of all rows of the step."""
    with pytest.raises(CaptureError, match="depends on the rows of the batch"):
        accumulate(lambda out, x: out.square().sum() / read(x), torch.rand(4, 3).double(), torch.rand(4, 3).double())


def test_the_reciprocal_of_how_many_rows_of_another_value_are_selected_is_refused():
    """A float has no symbol: the program of a larger batch has the size that this one has read."""

    def loss(out, x):
        chosen = x[:, 0] > 0
        return 1.0 / len(out[chosen]) * (out - 1)[chosen].square().sum()

    rows = torch.linspace(-1, 1, 12).double().reshape(4, 3)
    with pytest.raises(CaptureError, match="mixes rows of the batch"):
        accumulate(loss, rows, rows)


def test_a_length_read_from_the_batch_may_cut_its_padding():
    accumulate(
        lambda out, x: F.mse_loss(out, x[:, : int(x.amax().item())].sum(1, keepdim=True)),
        *[torch.full((4, 3), 2.0).double()] * 2,
    )


def test_a_mean_in_one_call_and_a_sum_in_another_are_refused():
    def loss(out, x):
        return out.mean() if x[0, 0] > 0 else out.sum()

    ones = torch.ones(4, 3).double()
    for batches in ((ones, -ones), (-ones, ones)):
        with pytest.raises(StepError, match="a mean in one call, and a sum in another"):
            accumulate(loss, *batches)

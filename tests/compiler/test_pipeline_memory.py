"""What the units of a pipeline keep of each microbatch is what its schedule says."""

import pytest
import torch
import torch.nn.functional as F
from simulated_pipelines import capture_job, run_on_simulated_pipeline
from torch import nn

from rankless.compiler.local_program import LocalProgram
from rankless.compiler.pipeline_parallel.data_flow import ValueKey
from rankless.compiler.pipeline_parallel.schedules import StageWorkers, make_schedule
from rankless.compiler.pipeline_parallel.step import PipelineRun

WORKERS, MICROBATCHES = 3, 6


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
@pytest.mark.ci_sample(2)
def test_a_worker_keeps_the_activations_of_as_many_microbatches_as_its_schedule_says(schedule):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(6)])
    arguments = [torch.randn(12, 6), torch.randint(0, 6, (12,))]

    def loss(inputs, labels):
        return F.cross_entropy(model(inputs), labels)

    program = capture_job(loss, {"model": model}, arguments, trains=True)
    found = run_on_simulated_pipeline(
        program, {"model": model}, arguments, workers=WORKERS, microbatches=MICROBATCHES, schedule=schedule
    )
    made = make_schedule(
        schedule,
        workers=WORKERS,
        stage_workers=StageWorkers.alternate(stages=found.stages.count, workers=WORKERS),
        microbatches=MICROBATCHES,
        trains=True,
    )
    assert [count_kept(local) for local in found.programs] == [made.count_held(worker) for worker in range(WORKERS)]


def count_kept(local: LocalProgram) -> int:
    """Return the most units of the forward pass whose values a worker keeps after some unit."""
    run = local.function
    assert isinstance(run, PipelineRun)
    remaining, made, most = dict(run.step.uses), {}, 0
    for unit, function in run.step.units:
        sent = [ValueKey(name, unit.microbatch) for name, *_ in run.step.sends[unit]]
        for key in (*function.inputs, *sent):
            remaining[key] -= 1
        if unit.kind == "forward":
            made[unit] = function.outputs
        kept = [keys for keys in made.values() if any(remaining.get(key, 0) > 0 for key in keys)]
        most = max(most, len(kept))
    return most


class Added(nn.Module):
    """Two parameters that are added, and so have one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6))
        self.last = nn.Linear(6, 6)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(F.linear(inputs, self.first.weight + self.second)))


@pytest.mark.parametrize("microbatches", [1, 3])
def test_parameters_with_one_gradient_have_memory_of_their_own(microbatches):
    torch.manual_seed(0)
    model, arguments = Added(), [torch.randn(12, 6), torch.randint(0, 6, (12,))]
    program = capture_job(lambda x, y: F.cross_entropy(model(x), y), {"model": model}, arguments, trains=True)
    found = run_on_simulated_pipeline(program, {"model": model}, arguments, workers=2, microbatches=microbatches)
    F.cross_entropy(model(arguments[0]), arguments[1]).backward()
    for name in ("first.weight", "second", "last.weight"):
        torch.testing.assert_close(found.gradients[f"model.{name}"], model.get_parameter(name).grad)


class UsedAtBothEnds(nn.Module):
    """A weight that the first stage takes through a function that is not linear, and the last one as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(6, 6)), nn.Linear(6, 6)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.last(inputs @ self.weight.tanh())) @ self.weight


@pytest.mark.parametrize("microbatches", [1, 3])
def test_terms_of_a_gradient_that_are_known_after_all_units_are_added(microbatches):
    torch.manual_seed(0)
    model, arguments = UsedAtBothEnds().double(), [torch.randn(12, 6).double(), torch.randint(0, 6, (12,))]
    program = capture_job(lambda x, y: F.cross_entropy(model(x), y), {"model": model}, arguments, trains=True)
    found = run_on_simulated_pipeline(program, {"model": model}, arguments, workers=2, microbatches=microbatches)
    F.cross_entropy(model(arguments[0]), arguments[1]).backward()
    torch.testing.assert_close(found.gradients["model.weight"], model.weight.grad, rtol=1e-12, atol=1e-12)


class UsedTwice(nn.Module):
    """Linear layers, one of which is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = (nn.Linear(6, 6, dtype=torch.float64) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.twice(self.twice(self.first(inputs)).tanh()))


@pytest.mark.ci_sample(5)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("rows", [(12,), (2, 3), (7,)], ids=["matrices", "more dims", "uneven"])
def test_products_of_later_microbatches_are_added_in_place(schedule, rows):
    torch.manual_seed(0)
    model = UsedTwice()
    arguments = [torch.randn(*rows, 6, dtype=torch.float64), torch.randint(0, 6, rows)]

    def loss(inputs, labels):
        return F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())

    program = capture_job(loss, {"model": model}, arguments, trains=True)
    microbatches = min(3, rows[0])
    found = run_on_simulated_pipeline(
        program, {"model": model}, arguments, workers=2, microbatches=microbatches, schedule=schedule
    )
    loss(*arguments).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.gradients[f"model.{name}"], parameter.grad, rtol=1e-12, atol=1e-12)
    weights = {ValueKey(name, is_sum=True) for name in list_products(found.programs)}
    for local in found.programs:
        taken = [key for _, function in local.function.step.units for key in function.inputs if key in weights]
        held = set(taken)
        assert held, "each stage has weights"
        assert len(taken) == len(held) * (microbatches - 1)


def list_products(programs: list[LocalProgram]) -> set[str]:
    """Return the names of the sums of matrix products that units return: those of the first microbatches."""
    returned = [function.sums for local in programs for _, function in local.function.step.units]
    return {name for sums in returned for name in sums if "mm" in name or "linear_weight" in name}

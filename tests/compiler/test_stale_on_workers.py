"""On two and three workers a job follows what its script changes between calls, or its functions run one by one."""

import pytest
import torch
import torch.nn.functional as F
from adversarial_cases import (
    AdversarialCase,
    assert_alike,
    batches,
    perceptron,
    run_captured,
    run_plain,
    without_layout,
)
from adversarial_python_state import counter_in_the_module, random_number_of_python
from adversarial_stale_modules import (
    hook_added_later,
    layers_unfrozen_later,
    mode_set_inside,
    module_appended_to_a_list,
)
from adversarial_stale_process import annealed_coefficient_of_a_trainer
from adversarial_stale_tensors import buffer_replaced_outside, parameter_replaced, weights_tied_later
from support.processes import on_mesh
from torch import Tensor, nn

from rankless.context.world import World
from rankless.jobs.job import make_job
from rankless.parallel.mesh import Mesh

SUPPORTED = [
    *(annealed_coefficient_of_a_trainer, layers_unfrozen_later, hook_added_later, buffer_replaced_outside),
    *(module_appended_to_a_list, parameter_replaced, weights_tied_later, mode_set_inside),
]
REFUSED = {
    counter_in_the_module: r"model\.calls was \d and is \d after the job",
    random_number_of_python: r"calls random\.random;",
}
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _restore_random_state():
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("build", SUPPORTED, ids=lambda build: build.__name__)
def test_every_rank_follows_what_the_script_changes(build, workers: int):
    case = AdversarialCase(build=build)
    expected = run_plain(case)
    for calls in on_mesh(workers, run_captured, case):
        assert_alike(calls, expected, case.tolerance)


@pytest.mark.ci_sample(3)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("build", REFUSED, ids=lambda build: build.__name__)
def test_a_job_that_no_program_can_follow_trains_as_the_plain_script(build, workers: int):
    case = AdversarialCase(build=build, refused=REFUSED[build])
    expected = without_layout(run_plain(case))
    for calls in on_mesh(workers, run_captured, case):
        assert_alike(without_layout(calls), expected, max(case.tolerance, 1e-11))


def train_with_edited_optimizer(mesh: Mesh | None) -> list[dict[str, Tensor]]:
    """Return the parameters after each of five steps of a script that edits its optimizer; None means no Rankless."""
    torch.manual_seed(3)
    model, more = perceptron(), nn.Linear(6, 8).double()
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}], lr=0.1, momentum=0.5)

    def loss(features, labels):
        return F.cross_entropy(model(features) + more(features)[:, :4], labels)

    if mesh is not None:
        world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)
        modules = {"model": model, "more": more}
        train = make_job(loss, model=modules, optimizer=optimizer, view="consistent", world=lambda: world)
    states = []
    for number, batch in enumerate(batches(count=5)):
        if number == 1:
            optimizer.param_groups[0]["lr"] = 0.01
        if number == 2:
            optimizer.add_param_group({"params": [*model[2].parameters(), *more.parameters()], "lr": 0.2})
        if number == 3:
            optimizer.param_groups[1]["params"].pop()
            optimizer.param_groups[0].update(momentum=0.9, weight_decay=0.3)
        if number == 4:
            optimizer.param_groups.reverse()
            optimizer.state.clear()
        if mesh is None:
            model.zero_grad()
            more.zero_grad()
            loss(*batch).backward()
            optimizer.step()
        else:
            train(*batch)
        states.append({name: item.detach().clone() for name, item in nn.ModuleList([model, more]).named_parameters()})
    return states


@pytest.mark.parametrize("workers", [2, 3])
def test_an_optimizer_edited_by_hand_steps_with_its_new_settings(workers: int):
    expected = train_with_edited_optimizer(None)
    for states in on_mesh(workers, train_with_edited_optimizer):
        for step, (ours, plain) in enumerate(zip(states, expected, strict=True)):
            for name, value in plain.items():
                torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-14, msg=f"step {step}: {name}")

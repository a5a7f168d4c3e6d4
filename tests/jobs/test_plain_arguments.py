"""Plain numbers among a job's arguments, and their programs."""

import pytest
import torch
from support.processes import on_mesh
from torch import nn

from rankless.context.world import World
from rankless.jobs.job import make_job
from rankless.jobs.programs.program_cache import MAX_ENTRIES
from rankless.user_code import display_name


def train_annealed(mesh, coefficients, as_tensor):
    """Return losses with a coefficient as an argument, the plain ones, the warnings, and the cached programs."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    warnings = []
    world = World(mesh=mesh, notify=warnings.append, send_record=lambda _: None)

    def train(x, *, settings, flag):
        return model(x).square().mean() * settings["coefficient"] * (2 if flag else 1)

    job = make_job(train, model=model, optimizer=optimizer, view="consistent", world=lambda: world)
    x = torch.randn(6, 3).double()
    losses = []
    for number, coefficient in enumerate(coefficients):
        settings = {"coefficient": torch.tensor(coefficient).double() if as_tensor else coefficient, "name": "a"}
        flag = number % 2 == 0
        found = job(x, settings=settings, flag=flag).item()
        losses.append((found, train(x, settings=settings, flag=flag).item()))
    kinds = job._views.view._programs._entries
    memory = {memory.flat.data_ptr() for memory in job._views.view._programs._memory._flats.values()}
    return losses, warnings, len(kinds), len(memory)


@pytest.mark.parametrize("workers", [2, 3])
def test_a_changing_number_is_right_and_warns_once_at_its_third_value(workers):
    for losses, warnings, kinds, memories in on_mesh(workers, train_annealed, [1.0, 0.5, 1.0, 0.25, 0.125, 0.1], False):
        assert all(found == pytest.approx(plain, rel=1e-14) for found, plain in losses)
        (notice,) = warnings
        assert "'settings'" in notice
        assert "torch.tensor(0.25)" in notice
        assert f"{display_name(__file__)}:" in notice
        assert kinds == 5
        assert memories == 1, "programs of one job share the memory of their gradients"


def test_two_values_of_a_number_or_a_tensor_do_not_warn():
    for _, warnings, kinds, _ in on_mesh(2, train_annealed, [1.0, 0.5, 1.0, 0.5], False):
        assert warnings == []
        assert kinds == 2
    for losses, warnings, kinds, _ in on_mesh(2, train_annealed, [1.0, 0.5, 0.25, 0.125, 0.1], True):
        assert all(found == pytest.approx(plain, rel=1e-14) for found, plain in losses)
        assert warnings == []
        assert kinds == 2


@pytest.mark.exhaustive
@pytest.mark.slow
def test_programs_of_a_number_that_always_changes_are_dropped():
    for losses, _, kinds, _ in on_mesh(
        2, train_annealed, [1 / (number + 1) for number in range(MAX_ENTRIES + 6)], False
    ):
        assert all(found == pytest.approx(plain, rel=1e-14) for found, plain in losses)
        assert kinds == MAX_ENTRIES

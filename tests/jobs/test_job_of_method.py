"""A job of a method: refused on the class, correct on an object."""

import pytest
import torch
from support.processes import on_mesh
from torch import nn

import rankless
from rankless.context.world import World
from rankless.errors import ConfigError
from rankless.jobs.job import make_job
from rankless.parallel.mesh import Mesh

model = nn.Linear(3, 1)


class Trainer:
    def __init__(self) -> None:
        self.scale = 2.0
        self.bound = rankless.job(model=model)(self.loss)

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        return model(rows).mean() * self.scale

    @rankless.job(model=model)
    def decorated(self, rows: torch.Tensor) -> torch.Tensor:
        return model(rows).mean()


def test_a_job_on_a_method_raises_with_the_fix() -> None:
    with pytest.raises(ConfigError, match=r"self\.decorated = rankless\.job\(model=…\)\(self\.decorated\)") as refused:
        Trainer().decorated(torch.ones(4, 3))
    assert "Trainer.decorated" in str(refused.value)
    assert "test_job_of_method.py:" in str(refused.value)


def test_a_job_of_a_bound_method_runs() -> None:
    rows = torch.ones(4, 3)
    assert torch.equal(Trainer().bound(rows), model(rows).mean().detach() * 2)


def test_a_job_is_an_attribute_of_the_class() -> None:
    assert Trainer.decorated.definition.name == "decorated"


def call_modules(mesh):
    """Return what a module, its `forward` and a function of it compute as jobs, and the lines of the jobs."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 4))
    world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)
    inputs = torch.linspace(-1, 1, 30).view(5, 6)
    jobs = [
        make_job(function, model=model, optimizer=None, view=None, world=lambda: world)
        for function in (model, model.forward, lambda x: model(x))
    ]
    return [job(inputs) for job in jobs], [job.definition.line for job in jobs]


def test_a_module_of_pytorch_is_a_job_without_a_line_of_its_own_in_the_script():
    for results, lines in [call_modules(Mesh.solo()), *on_mesh(2, call_modules)]:
        torch.testing.assert_close(results[0], results[2])
        torch.testing.assert_close(results[1], results[2])
        assert all(line.startswith(lines[2].rpartition(":")[0]) for line in lines)

"""Optimizers that compute the loss several times in a step train as `optimizer.step(closure)` does in plain scripts."""

import pytest
import torch
import torch.nn.functional as F
from support.processes import on_mesh
from torch import nn

import rankless
from rankless.context.world import World
from rankless.errors import ConfigError
from rankless.jobs.job import make_job
from rankless.parallel.mesh import Mesh

SETTINGS = {
    "fixed steps": {"lr": 0.3, "max_iter": 4},
    "line search": {"lr": 0.8, "max_iter": 6, "line_search_fn": "strong_wolfe", "history_size": 3},
}


class AscendAndDescend(torch.optim.Optimizer):
    """Steps with the gradient at a point near by, as SAM does: two evaluations, of which the first is at home."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure):
        loss = torch.enable_grad()(closure)()
        parameters = self.param_groups[0]["params"]
        moves = [0.05 * item.grad for item in parameters]
        torch._foreach_add_(parameters, moves)
        torch.enable_grad()(closure)()
        torch._foreach_sub_(parameters, moves)
        torch._foreach_sub_(parameters, [0.1 * item.grad for item in parameters])
        return loss


def make_parts(name: str, dropout: float):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 3)).double()
    if name == "two evaluations":
        return model, AscendAndDescend(model.parameters())
    return model, torch.optim.LBFGS(model.parameters(), **SETTINGS[name])


def batches():
    torch.manual_seed(4)
    return [(torch.randn(rows, 5).double(), torch.randint(0, 3, (rows,))) for rows in (7, 7, 4)]


def train_plain(name: str, dropout: float):
    model, optimizer = make_parts(name, dropout)
    losses = []
    for x, y in batches():
        evaluations = []

        def closure(x=x, y=y, evaluations=evaluations):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            evaluations.append(float(loss.detach()))
            return loss

        losses.append((float(optimizer.step(closure)), len(evaluations)))
    return losses, [item.detach().clone() for item in model.parameters()], float(torch.rand(()))


def train_jobs(mesh, name: str, dropout: float, view: str = "consistent"):
    model, optimizer = make_parts(name, dropout)
    evaluations = 0
    world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)

    def loss(x, y):
        return F.cross_entropy(model(x), y)

    job = make_job(loss, model=model, optimizer=optimizer, view=view, world=lambda: world)
    honest = job._views.run

    def run(*arguments):
        nonlocal evaluations
        evaluations += 1
        return honest(*arguments)

    job._views.run = run
    losses = []
    for x, y in batches():
        evaluations = 0
        losses.append((float(job(x, y)), evaluations))
    return losses, [item.detach().clone() for item in model.parameters()], float(torch.rand(()))


def require_equal(found, wanted, bound: float):
    for (loss, count), (plain_loss, plain_count) in zip(found[0], wanted[0], strict=True):
        assert count == plain_count > 1
        assert loss == pytest.approx(plain_loss, rel=bound, abs=bound)
    for ours, plain in zip(found[1], wanted[1], strict=True):
        torch.testing.assert_close(ours, plain, rtol=bound, atol=bound)
    assert found[2] == wanted[2]  # the generator has drawn as much


NAMES = [*SETTINGS, "two evaluations"]


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("name", NAMES)
def test_on_one_device_a_job_is_the_plain_script(name, dropout):
    require_equal(train_jobs(Mesh.solo(), name, dropout), train_plain(name, dropout), 0.0)


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_on_workers_each_evaluation_is_a_program_run_of_the_whole_batch(workers):
    cases = [(name, dropout) for name in NAMES for dropout in (0.0, 0.25)]
    results = on_mesh(workers, train_cases, cases)
    for place, case in enumerate(cases):
        found = [worker[place] for worker in results]
        require_equal(found[0], train_plain(*case), 1e-9)
        for other in found[1:]:
            require_equal(other, found[0], 0.0)


def train_cases(mesh, cases):
    return [train_jobs(mesh, *case) for case in cases]


def train_whole_batch(mesh):
    return train_jobs(mesh, "line search", 0.0, view="whole")


def test_without_capture_workers_train_as_the_plain_script():
    wanted = train_plain("line search", 0.0)
    for found in on_mesh(2, train_whole_batch):
        require_equal(found, wanted, 1e-12)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"accumulate": 2}, "accumulate=2"),
        ({"clip_norm": 1.0}, "clip_norm=1.0"),
        ({"zero": "optimizer"}, "zero='optimizer'"),
        ({"check_finite": True}, "check_finite=True"),
    ],
)
def test_options_for_gradients_are_refused_by_name(options, found):
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=found):
        rankless.job(model=model, optimizer=torch.optim.LBFGS(model.parameters()), **options)(lambda x: model(x).mean())


def test_another_optimizer_beside_it_is_refused():
    model = nn.Linear(2, 2)
    optimizers = [torch.optim.LBFGS([model.weight]), torch.optim.SGD([model.bias], lr=0.1)]
    with pytest.raises(ConfigError, match="2 optimizers"):
        rankless.job(model=model, optimizer=optimizers)(lambda x: model(x).mean())

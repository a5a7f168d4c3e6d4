"""Clipping, the gradient's norm, non-finite values, several optimizers: on one device and on real workers."""

import math

import pytest
import torch
import torch.nn.functional as F
from support.processes import on_mesh
from torch import nn

from rankless.context.world import World
from rankless.data.loader import Loader, LoaderOptions
from rankless.errors import ConfigError, StepError
from rankless.jobs.job import make_job
from rankless.jobs.job_definition import StepOptions
from rankless.parallel.mesh import Mesh

STEPS = 6


def make_world(mesh, warnings=None):
    return World(
        mesh=mesh, notify=lambda text: None if warnings is None else warnings.append(text), send_record=lambda _: None
    )


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def batches(rows=7, count=STEPS):
    torch.manual_seed(4)
    return [(torch.randn(rows, 5).double() * 3, torch.randint(0, 4, (rows,))) for _ in range(count)]


def make_test_job(function, model, optimizer, mesh, warnings=None, **settings):
    world = make_world(mesh, warnings)
    return make_job(
        function,
        model=model,
        optimizer=optimizer,
        view="consistent",
        world=lambda: world,
        step_options=StepOptions(**settings),
    )


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def train_clipped(mesh, settings):
    model = network()
    job = make_test_job(lambda x, y: F.cross_entropy(model(x), y), model, sgd(model), mesh, **settings)
    norms = []
    for batch in batches():
        job(*batch)
        if job.definition.step_options.measures_norm:
            norms.append(float(job.gradient_norm))
    return norms, [item.detach().clone() for item in model.parameters()]


def train_clipped_plainly(settings):
    model = network()
    optimizer = sgd(model)
    norms = []
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if "clip_norm" in settings:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), settings["clip_norm"])))
        elif "clip_value" in settings:
            nn.utils.clip_grad_value_(model.parameters(), settings["clip_value"])
        if settings.get("gradient_norm") and "clip_norm" not in settings:
            norms.append(math.sqrt(sum(float(item.grad.square().sum()) for item in model.parameters())))
        optimizer.step()
    return norms, list(model.parameters())


def assert_near(found, wanted):
    for ours, plain in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, plain.detach(), rtol=1e-12, atol=1e-13)


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("settings", [{"clip_norm": 0.2}, {"clip_value": 0.05}, {"gradient_norm": True}], ids=str)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_gradient_is_clipped_and_measured_as_in_the_plain_script(workers, settings):
    norms, parameters = train_clipped_plainly(settings)
    ranks = [train_clipped(Mesh.solo(), settings)] if workers == 1 else on_mesh(workers, train_clipped, settings)
    assert all(rank[0] == ranks[0][0] for rank in ranks)
    assert ranks[0][0] == pytest.approx(norms, rel=1e-12)
    assert_near(ranks[0][1], parameters)


def train_accumulated_and_clipped(mesh):
    model = network()
    job = make_test_job(lambda x, y: F.cross_entropy(model(x), y), model, sgd(model), mesh, accumulate=2, clip_norm=0.2)
    stepped = []
    for batch in batches():
        job(*batch)
        stepped.append(job.stepped)
    return stepped, [item.detach().clone() for item in model.parameters()], float(job.gradient_norm)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.ci_sample(1)
def test_an_accumulated_gradient_is_clipped_once_per_step(workers):
    model = network()
    optimizer = sgd(model)
    pairs = batches()
    for (x, y), (more, further) in zip(pairs[::2], pairs[1::2], strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.cat([x, more])), torch.cat([y, further])).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
    ranks = (
        [train_accumulated_and_clipped(Mesh.solo())]
        if workers == 1
        else on_mesh(workers, train_accumulated_and_clipped)
    )
    for stepped, parameters, found in ranks:
        assert stepped == [False, True] * (STEPS // 2)
        assert found == pytest.approx(float(norm), rel=1e-12)
        assert_near(parameters, model.parameters())


def test_invalid_step_options_raise_by_name():
    model = network()
    for settings, found in [
        ({"clip_norm": 1.0, "clip_value": 0.5}, "clip_norm=1.0 and clip_value=0.5"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"accumulate": 2.5}, "accumulate=2.5"),
        ({"clip_norm": 0}, "clip_norm=0"),
        ({"clip_value": math.nan}, "clip_value=nan"),
    ]:
        with pytest.raises(ConfigError, match=found):
            make_test_job(lambda x: x, model, sgd(model), Mesh.solo(), **settings)
    with pytest.raises(ConfigError, match="which makes no steps"):
        make_test_job(lambda x: x, model, None, Mesh.solo(), accumulate=2)
    with pytest.raises(ConfigError, match="list of them"):
        make_test_job(lambda x: x, model, [sgd(model), "SGD"], Mesh.solo())


def test_reading_an_unmeasured_norm_raises_with_the_keyword():
    model = network()
    job = make_test_job(lambda x, y: F.cross_entropy(model(x), y), model, sgd(model), Mesh.solo())
    job(*batches()[0])
    with pytest.raises(ConfigError, match="gradient_norm=True"):
        _ = job.gradient_norm


def train_until_not_finite(mesh, where, accumulate):
    model = network()
    optimizer = torch.optim.Adam(model.parameters())

    def train(x, y):
        loss = F.cross_entropy(model(x), y)
        # A gradient that is not finite while the loss is: the slope of a root at zero.
        return loss + (model(x)[:, 0] * 0).abs().sqrt().mean() if where == "gradient" else loss

    job = make_test_job(train, model, optimizer, mesh, check_finite=True, accumulate=accumulate)
    good = batches()
    if where == "loss":
        job(*good[0])
    before = [item.detach().clone() for item in model.parameters()]
    grads = [None if item.grad is None else item.grad.clone() for item in model.parameters()]
    x, y = good[1]
    if where == "loss":
        x = x.clone()
        x[2, 3] = math.nan
    try:
        job(x, y)
    except StepError as error:
        same = all(map(torch.equal, before, model.parameters()))
        if accumulate > 1 and where == "loss":
            same = same and all(map(torch.equal, (item.grad for item in model.parameters()), grads))
        return error.found, error.expected, error.where, same
    return None


@pytest.mark.ci_sample(3)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_non_finite_values_raise_by_name_on_every_rank_without_a_step(workers, where, accumulate):
    arguments = (where, accumulate)
    ranks = (
        [train_until_not_finite(Mesh.solo(), *arguments)]
        if workers == 1
        else on_mesh(workers, train_until_not_finite, *arguments)
    )
    for rank in ranks:
        assert rank is not None, "nothing was raised"
        found, expected, line, unchanged = rank
        assert found == ("a loss of nan" if where == "loss" else "the gradient of model.0.weight is not finite")
        number = 2 if where == "loss" and accumulate == 1 else 1
        assert f"step {number} of job 'train'" in expected
        assert "test_optimizer_step.py:" in line
        assert unchanged


def train_with_two_optimizers(mesh):
    model = network()
    slow = torch.optim.SGD(model[0].parameters(), lr=0.01)
    fast = torch.optim.Adam(model[2].parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(slow, 2, gamma=0.5)
    job = make_test_job(lambda x, y: F.cross_entropy(model(x), y), model, [slow, fast], mesh)
    for batch in batches():
        job(*batch)
        schedule.step()
    return [item.detach().clone() for item in model.parameters()]


def train_with_two_optimizers_plainly():
    model = network()
    slow = torch.optim.SGD(model[0].parameters(), lr=0.01)
    fast = torch.optim.Adam(model[2].parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(slow, 2, gamma=0.5)
    for x, y in batches():
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        slow.step()
        fast.step()
        schedule.step()
    return list(model.parameters())


def train_two_jobs(mesh):
    """Two jobs with own optimizers for parts of one model; each clears the gradients of its part alone."""
    model = network()
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (model[0], model[2]))
    one = make_test_job(lambda x, y: F.cross_entropy(model(x), y), model, first, mesh)
    other = make_test_job(lambda x, y: model(x).square().mean() + 0 * y.sum(), model, second, mesh)
    gradients = []
    for batch in batches():
        for job in (one, other):
            job(*batch)
            gradients.append([item.grad.clone() for item in model.parameters()])
    return [item.detach().clone() for item in model.parameters()], gradients[-1]


def train_two_jobs_plainly():
    model = network()
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (model[0], model[2]))
    for x, y in batches():
        first.zero_grad()
        F.cross_entropy(model(x), y).backward()
        first.step()
        second.zero_grad()
        model(x).square().mean().backward()
        second.step()
    return list(model.parameters()), [item.grad for item in model.parameters()]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_several_optimizers_and_a_scheduler_step_as_in_the_plain_script(workers):
    wanted = train_with_two_optimizers_plainly()
    for parameters in (
        [train_with_two_optimizers(Mesh.solo())] if workers == 1 else on_mesh(workers, train_with_two_optimizers)
    ):
        # Adam's steps follow the rounding of gradients, whose own bound is 1e-12.
        for ours, plain in zip(parameters, wanted, strict=True):
            torch.testing.assert_close(ours, plain.detach(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.ci_sample(1)
def test_two_jobs_on_one_model_train_as_the_plain_script(workers):
    parameters, gradients = train_two_jobs_plainly()
    for ours, theirs in [train_two_jobs(Mesh.solo())] if workers == 1 else on_mesh(workers, train_two_jobs):
        assert_near(ours, parameters)
        assert_near(theirs, gradients)


def train_epochs(mesh, accumulate, calls_per_batch, use_sampler):
    """Train on batches of four rows and a shorter last one; return the steps after every pass."""
    model = network()
    warnings = []
    optimizer = sgd(model)
    job = make_test_job(
        lambda x, y: F.cross_entropy(model(x), y), model, optimizer, mesh, warnings, accumulate=accumulate
    )
    torch.manual_seed(5)
    data = torch.utils.data.TensorDataset(torch.randn(22, 5).double(), torch.randint(0, 4, (22,)))
    sampler = UnsizedSampler(range(22)) if use_sampler else None
    world = make_world(mesh)
    loader = Loader(data, options=LoaderOptions(batch_size=4, sampler=sampler), world=lambda: world)
    object.__setattr__(world, "passes", job._world().passes)
    trail = []
    for _ in range(2):
        for batch in loader:
            for _ in range(calls_per_batch):
                job(*batch)
                trail.append(job.stepped)
        trail.append(job._stepper.steps)
    assert not job.flush(), "a pass's end left calls in hand"
    return trail, warnings, [item.detach().clone() for item in model.parameters()]


class UnsizedSampler:
    """A sampler without a length."""

    def __init__(self, indices):
        self.indices = indices

    def __iter__(self):
        return iter(self.indices)


def train_epochs_plainly(accumulate, calls_per_batch):
    model = network()
    optimizer = sgd(model)
    torch.manual_seed(5)
    x, y = torch.randn(22, 5).double(), torch.randint(0, 4, (22,))
    pieces = [piece for piece in torch.arange(22).split(4) for _ in range(calls_per_batch)]
    for _ in range(2):
        for start in range(0, len(pieces), accumulate):
            rows = torch.cat(pieces[start : start + accumulate])
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return list(model.parameters())


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.ci_sample(1)
def test_the_last_call_of_a_pass_makes_the_step_of_fewer_calls(workers):
    arguments = (4, 1, False)
    ranks = [train_epochs(Mesh.solo(), *arguments)] if workers == 1 else on_mesh(workers, train_epochs, *arguments)
    for trail, warnings, parameters in ranks:
        one_pass = [False, False, False, True, False, True]
        assert trail == [*one_pass, 2, *one_pass, 4]
        assert warnings == []
        assert_near(parameters, train_epochs_plainly(4, 1))


@pytest.mark.parametrize(
    ("calls", "use_sampler"), [(2, False), (1, True)], ids=["two calls per batch", "length unknown"]
)
def test_the_end_of_a_pass_makes_the_step_if_the_last_call_is_unknown(calls, use_sampler):
    for trail, _, parameters in on_mesh(2, train_epochs, 5, calls, use_sampler):
        per_pass = 6 * calls // 5 + (6 * calls % 5 > 0)
        assert [item for item in trail if item is not True and item is not False] == [per_pass, 2 * per_pass]
        assert sum(item is True for item in trail) == 2 * (6 * calls // 5)
        assert_near(parameters, train_epochs_plainly(5, calls))


def test_calls_without_a_step_warn_at_the_next_loop_and_at_the_end():
    model = network()
    warnings = []
    job = make_test_job(
        lambda x, y: F.cross_entropy(model(x), y), model, sgd(model), Mesh.solo(), warnings, accumulate=4
    )
    data = torch.utils.data.TensorDataset(torch.randn(8, 5).double(), torch.randint(0, 4, (8,)))
    loader = Loader(data, options=LoaderOptions(batch_size=2), world=job._world)
    for batch in loader:
        job(*batch)
        break
    assert warnings == []
    for batch in loader:
        job(*batch)
        break
    assert len(warnings) == 1
    assert "with 1 of 4 calls of job '<lambda>' accumulated" in warnings[0]
    job._world().passes.warn_unfinished(warnings.append)
    assert "2 of 4 calls" in warnings[1]
    assert ".flush()" in warnings[1]
    assert job.flush()
    job._world().passes.warn_unfinished(warnings.append)
    assert len(warnings) == 2


def test_a_pass_over_another_loader_makes_no_step():
    model = network()
    job = make_test_job(lambda x, y: F.cross_entropy(model(x), y), model, sgd(model), Mesh.solo(), accumulate=3)
    data = torch.utils.data.TensorDataset(torch.randn(8, 5).double(), torch.randint(0, 4, (8,)))
    loader = Loader(data, options=LoaderOptions(batch_size=2), world=job._world)
    stepped = []
    for batch in loader:
        job(*batch)
        stepped.append(job.stepped)
        for _ in Loader(data, options=LoaderOptions(batch_size=4), world=job._world):
            pass
    assert stepped == [False, False, True, True]
    assert job._stepper.steps == 2

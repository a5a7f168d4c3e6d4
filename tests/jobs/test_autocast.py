"""bfloat16 autocast, inside a job and around its call, against the plain script under the same autocast.

Note [the bound of bfloat16]: autocast rounds products to 8 bits. A weight's gradient is a sum over rows that is rounded
once. On workers each part of it is rounded, and the parts are added in float32. Losses and gradients of a step may
therefore differ by one rounding of the largest entry. If PyTorch itself keeps sums in bfloat16, as for a bias's
gradient, they may differ by twice the difference between the plain script and itself with permuted rows.
"""

import pytest
import torch
import torch.nn.functional as F
from support.processes import on_mesh
from torch import nn

from rankless.context.world import World
from rankless.jobs.arguments import flatten_arguments
from rankless.jobs.job import make_job
from rankless.jobs.job_definition import StepOptions
from rankless.jobs.views.captured import ConsistentView
from rankless.parallel.mesh import Mesh

DRIFTS = 2
EPSILON = torch.finfo(torch.bfloat16).eps
STEPS = 4


def autocast(enabled=True):
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


def network():
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 4))


def batches():
    torch.manual_seed(7)
    return [(torch.randn(11, 6), torch.randint(0, 4, (11,))) for _ in range(STEPS)]


def loss_inside(model):
    def loss(x, y):
        with autocast():
            scores = model(x)
        return F.cross_entropy(scores.float(), y)

    return loss


def loss_around(model):
    def loss(x, y):
        with autocast(enabled=False):
            first = model[0](x)
        return F.cross_entropy(model[3](model[2](model[1](first))), y)

    return loss


def train_with_autocast(mesh, where, captured=False):
    """Return losses, gradients and dtypes of every step; every second call is outside the autocast."""
    model = network()
    world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)
    job = make_job(
        (loss_inside if where == "inside" else loss_around)(model),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        view="consistent",
        world=lambda: world,
        step_options=StepOptions(),
    )
    view = ConsistentView(job.definition, world) if captured else None
    found = []
    with autocast(enabled=where == "around"):
        for number, (x, y) in enumerate(batches()):
            with autocast(enabled=where == "around" and number % 2 == 0):
                if view is None:
                    loss = job(x, y)
                else:
                    loss = view.run(flatten_arguments((x, y), {}, mesh.device)).result
                    job.definition.optimizers[0].step()
            found.append((loss, [item.grad.clone() for item in model.parameters()]))
    return found


def train_plainly(where, permuted=None):
    model = network()
    loss = (loss_inside if where == "inside" else loss_around)(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for number, (x, y) in enumerate(batches()):
        order = torch.arange(11) if permuted is None else torch.randperm(11, generator=permuted)
        optimizer.zero_grad()
        with autocast(enabled=where == "around" and number % 2 == 0):
            value = loss(x[order], y[order])
        value.backward()
        optimizer.step()
        found.append((value.detach(), [item.grad.clone() for item in model.parameters()]))
    return found


def largest_difference(found, wanted):
    pairs = [
        (ours, plain)
        for (loss, gradients), (plain_loss, plain_gradients) in zip(found, wanted, strict=True)
        for ours, plain in zip([loss, *gradients], [plain_loss, *plain_gradients], strict=True)
    ]
    assert all((ours.dtype, ours.shape) == (plain.dtype, plain.shape) for ours, plain in pairs)
    return max(float((ours - plain).abs().max() / plain.abs().max()) for ours, plain in pairs)


@pytest.mark.parametrize("where", ["inside", "around"])
def test_on_one_device_autocast_equals_the_plain_scripts(where):
    assert largest_difference(train_with_autocast(Mesh.solo(), where), train_plainly(where)) == 0


@pytest.mark.parametrize("where", ["inside", "around"])
def test_a_captured_program_casts_exactly_as_the_plain_script(where):
    assert largest_difference(train_with_autocast(Mesh.solo(), where, captured=True), train_plainly(where)) <= 1e-5


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("where", ["inside", "around"])
def test_on_workers_autocast_equals_the_plain_scripts_up_to_rounding(where, workers):
    wanted = train_plainly(where)
    generator = torch.Generator(torch.get_default_device()).manual_seed(8)
    drift = max(largest_difference(train_plainly(where, generator), wanted) for _ in range(4))
    for found in on_mesh(workers, train_with_autocast, where):
        off = largest_difference(found, wanted)
        assert off <= max(DRIFTS * drift, EPSILON), f"off by {off:.3g}, plain scripts by {drift:.3g}"


def test_a_missing_autocast_would_be_detected():
    """The calls of a script that stand in an autocast and those that do not are told apart by these tests."""
    assert largest_difference(train_plainly("around"), train_plainly("outside")) > 1e-4


def train_inside_autocast(mesh):
    """Train with one autocast around the whole loop: no cast weight may outlive the step that changes it."""
    model = network()
    world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)
    job = make_job(
        lambda x, y: F.cross_entropy(model(x), y),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        view="consistent",
        world=lambda: world,
        step_options=StepOptions(accumulate=2, clip_norm=1.0),
    )
    with autocast():
        return [float(job(*batches()[0])) for _ in range(6)]


@pytest.mark.parametrize("workers", [1, 2])
def test_autocast_around_a_whole_loop_trains(workers):
    for losses in [train_inside_autocast(Mesh.solo())] if workers == 1 else on_mesh(workers, train_inside_autocast):
        assert losses[0] == losses[1]
        assert losses[2] == losses[3] < losses[0]
        assert losses[4] == losses[5] < losses[2]


RECURRENT = {
    "LSTM": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "LSTM with projections": lambda: nn.LSTM(3, 4, proj_size=2),
    "GRU": lambda: nn.GRU(3, 4, batch_first=True),
    "RNN": lambda: nn.RNN(3, 4),
}


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.ci_sample(2)
def test_a_recurrent_layer_computes_in_the_precision_of_a_plain_run(name):
    torch.manual_seed(0)
    layer, x = RECURRENT[name](), torch.randn(5, 4, 3)
    world = World(mesh=Mesh.solo(), notify=lambda _: None, send_record=lambda _: None)
    job = make_job(lambda x: layer(x)[0], model=layer, optimizer=None, view="consistent", world=lambda: world)
    with autocast():
        plain = layer(x)[0].detach()
        found = ConsistentView(job.definition, world).run(flatten_arguments((x,), {}, x.device)).result
    assert found.dtype == plain.dtype
    assert torch.equal(found, plain)


WITH_DROPOUT = {
    "LSTM": lambda: nn.LSTM(3, 4, num_layers=3, dropout=0.5, bidirectional=True),
    "LSTM with projections": lambda: nn.LSTM(3, 4, num_layers=2, dropout=0.5, proj_size=2),
    "GRU": lambda: nn.GRU(3, 4, num_layers=2, dropout=0.5, batch_first=True),
    "RNN": lambda: nn.RNN(3, 4, num_layers=3, dropout=0.5, nonlinearity="relu", bidirectional=True, bias=False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_autocast_leaves_the_dropout_between_recurrent_layers(name, dtype):
    """PyTorch's formula for a traced layer has no dropout, and under autocast some layers are traced."""
    torch.manual_seed(0)
    layer, x = WITH_DROPOUT[name]().to(dtype), torch.randn(5, 4, 3, dtype=dtype)
    world = World(mesh=Mesh.solo(), notify=lambda _: None, send_record=lambda _: None)
    job = make_job(lambda x: layer(x)[0], model=layer, optimizer=None, view="consistent", world=lambda: world)
    with autocast():
        torch.manual_seed(1)
        plain = layer(x)[0].detach()
        torch.manual_seed(1)
        found = ConsistentView(job.definition, world).run(flatten_arguments((x,), {}, x.device)).result
    assert not torch.equal(plain, layer.eval()(x)[0])
    torch.testing.assert_close(found, plain)

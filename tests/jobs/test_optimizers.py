"""Every optimizer of torch.optim equals the plain script's or is refused, and which of them work elementwise."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from support.processes import on_mesh
from torch import nn

from rankless.context.world import World
from rankless.errors import ConfigError
from rankless.jobs.job import make_job
from rankless.parallel.mesh import Mesh

CLASSES = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
ELEMENTWISE = {
    "ASGD": [{}, {"lr": 0.1, "weight_decay": 0.1}],
    "Adadelta": [{}, {"rho": 0.5, "weight_decay": 0.1}],
    "Adagrad": [{}, {"lr_decay": 0.1, "weight_decay": 0.1}],
    "Adam": [{}, {"amsgrad": True, "weight_decay": 0.1}, {"betas": (0.5, 0.9)}],
    "AdamW": [{}, {"amsgrad": True, "weight_decay": 0.1}],
    "Adamax": [{}, {"weight_decay": 0.1}],
    "NAdam": [{}, {"momentum_decay": 0.1, "weight_decay": 0.1}],
    "RAdam": [{}, {"weight_decay": 0.1}],
    "RMSprop": [{}, {"centered": True, "momentum": 0.9}],
    "Rprop": [{}, {"etas": (0.4, 1.3)}],
    "SGD": [{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
}
"""Each element's step depends on that element alone (checked below), with these settings."""
WHOLE = {"Adafactor": [{}], "Muon": [{}]}
"""They use norms or factors of whole tensors: correct because parameters are whole on every worker."""
CLOSURES = {"LBFGS"}
"""They compute the loss several times in a step: test_closure_steps.py has them."""
SPARSE = {"SparseAdam"}
"""They step sparse gradients only: tests/jobs/test_table_runs.py has them."""
GAIN = 1e4
"""How far the rounding of gradients (1e-16) may grow in three steps of an optimizer that divides by their size."""


def test_every_optimizer_of_pytorch_is_classified():
    assert set(CLASSES) == {*ELEMENTWISE, *WHOLE, *CLOSURES, *SPARSE}


def take_steps(name, settings, value, gradients):
    """Return the value after a step for each gradient."""
    parameter = nn.Parameter(value.clone())
    optimizer = CLASSES[name]([parameter], **settings)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def take_steps_in_halves(name, settings, value, gradients):
    return torch.cat(
        [
            take_steps(name, settings, part, [item.chunk(2)[place] for item in gradients])
            for place, part in enumerate(value.chunk(2))
        ]
    )


@pytest.mark.parametrize("name", [*ELEMENTWISE, *WHOLE])
def test_only_elementwise_optimizers_step_on_halves_as_on_the_whole(name):
    torch.manual_seed(1)
    dtype = torch.float64
    value, gradients = torch.randn(6, 4, dtype=dtype), [torch.randn(6, 4, dtype=dtype) for _ in range(3)]
    for settings in {**ELEMENTWISE, **WHOLE}[name]:
        whole, halves = (
            take_steps(name, settings, value, gradients),
            take_steps_in_halves(name, settings, value, gradients),
        )
        assert torch.equal(whole, halves) == (name in ELEMENTWISE)


def network():
    torch.manual_seed(3)
    # Muon takes matrices alone.
    return nn.Sequential(nn.Linear(5, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False)).double()


def batches():
    torch.manual_seed(4)
    return [(torch.randn(rows, 5).double(), torch.randint(0, 4, (rows,))) for rows in (7, 7, 4)]


def train_all_optimizers(mesh):
    """Return parameters and state after three steps, by optimizer and settings."""
    found = {}
    for name, all_settings in {**ELEMENTWISE, **WHOLE}.items():
        for place, settings in enumerate(all_settings):
            model = network()
            optimizer = CLASSES[name](model.parameters(), **settings)
            world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)

            def loss(x, y, model=model):
                return F.cross_entropy(model(x), y)

            job = make_job(loss, model=model, optimizer=optimizer, view="consistent", world=lambda world=world: world)
            for x, y in batches():
                if mesh.size == 1:
                    optimizer.zero_grad()
                    loss(x, y).backward()
                    optimizer.step()
                else:
                    job(x, y)
            found[name, place] = [item.detach().clone() for item in model.parameters()]
    return found


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_supported_optimizers_train_on_workers_as_in_the_plain_script(workers):
    wanted = train_all_optimizers(Mesh.solo())
    for found in on_mesh(workers, train_all_optimizers):
        for key, parameters in found.items():
            # Muon orthogonalises in bfloat16, whose rounding turns over where the gradient's last bit does.
            bound = 0.02 if key[0] == "Muon" else GAIN * 1e-15
            for ours, plain in zip(parameters, wanted[key], strict=True):
                assert float((ours - plain).abs().max()) <= bound * float(plain.abs().max()), key


def train_with_edits(mesh):
    """Train with edited rates and groups, a group added later, states saved and loaded, and three schedulers."""
    model, head = network(), nn.Linear(4, 4).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)

    def loss(x, y):
        return F.cross_entropy(head(model(x)), y)

    world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)
    job = make_job(loss, model=[model, head], optimizer=optimizer, view="consistent", world=lambda: world)
    for number, (x, y) in enumerate(batches() * 3):
        if mesh.size == 1:
            model.zero_grad()
            head.zero_grad()
            value = loss(x, y)
            value.backward()
            optimizer.step()
        else:
            value = job(x, y)
        rates.step()
        if number == 1:
            optimizer.add_param_group({"params": head.parameters(), "lr": 0.02, "weight_decay": 0.1})
            rates.base_lrs.append(0.02)
            rates.lr_lambdas.append(rates.lr_lambdas[0])
            plateau.min_lrs.append(0.0)
        if number == 3:
            optimizer.param_groups[0]["lr"] *= 0.3
            optimizer.param_groups[0]["momentum"] = 0.5
        if number == 5:
            state, schedule = optimizer.state_dict(), plateau.state_dict()
            optimizer.load_state_dict(state)
            plateau.load_state_dict(schedule)
        plateau.step(float(value.detach()))
    return [item.detach().clone() for item in (*model.parameters(), *head.parameters())]


def test_edited_groups_and_rates_and_loaded_states_take_effect():
    wanted = train_with_edits(Mesh.solo())
    for found in on_mesh(2, train_with_edits):
        for ours, plain in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-13)


def test_a_later_group_with_unknown_parameters_raises_at_the_call():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world = World(mesh=Mesh.solo(), notify=print, send_record=print)
    job = make_job(
        lambda x, y: F.cross_entropy(model(x), y),
        model=model,
        optimizer=optimizer,
        view="consistent",
        world=lambda: world,
    )
    job(*batches()[0])
    optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    with pytest.raises(ConfigError, match="to none of them"):
        job(*batches()[0])


def train_averaged(mesh):
    """Train with a running average of the weights, evaluated with a short last batch, and early stopping."""
    model = network()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5), use_buffers=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def loss(x, y):
        scores = model(x)
        hits = scores.argmax(1) == y
        return F.cross_entropy(scores, y), {"accuracy": hits.double().mean(), "hits": hits.sum()}

    def evaluate(x, y):
        return F.cross_entropy(average(x), y, reduction="sum")

    world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)
    train = make_job(loss, model=model, optimizer=optimizer, view="consistent", world=lambda: world)
    judge = make_job(evaluate, model={"average": average}, optimizer=None, view="consistent", world=lambda: world)
    best, waited, trail = float("inf"), 0, []
    for _ in range(12):
        for x, y in batches():
            _, metrics = train(x, y)
            trail.append((float(metrics["accuracy"]), int(metrics["hits"])))
            average.update_parameters(model)
        held_out = [(x + 1, y) for x, y in batches()]
        score = sum(float(judge(x, y)) for x, y in held_out) / sum(len(y) for _, y in held_out)
        trail.append(score)
        best, waited = (score, 0) if score < best - 1e-3 else (best, waited + 1)
        if waited == 2:
            break
    return trail


def train_averaged_plainly():
    model = network()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5), use_buffers=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    best, waited, trail = float("inf"), 0, []
    for _ in range(12):
        for x, y in batches():
            optimizer.zero_grad()
            scores = model(x)
            F.cross_entropy(scores, y).backward()
            optimizer.step()
            hits = scores.argmax(1) == y
            trail.append((float(hits.double().mean()), int(hits.sum())))
            average.update_parameters(model)
        with torch.no_grad():
            total = sum(float(F.cross_entropy(average(x + 1), y, reduction="sum")) for x, y in batches())
        score = total / sum(len(y) for _, y in batches())
        trail.append(score)
        best, waited = (score, 0) if score < best - 1e-3 else (best, waited + 1)
        if waited == 2:
            break
    return trail


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.ci_sample(1)
def test_metrics_averaging_and_early_stopping_act_as_in_the_plain_script(workers):
    wanted = train_averaged_plainly()
    assert len(wanted) < 12 * 4, "the plain script never stops early"
    for found in [train_averaged(Mesh.solo())] if workers == 1 else on_mesh(workers, train_averaged):
        assert len(found) == len(wanted)
        for ours, plain in zip(found, wanted, strict=True):
            assert ours == pytest.approx(plain, rel=1e-10)

"""Optimizers and schedules on real workers against the plain script."""

import pytest
import torch
import torch.nn.functional as F
from exactness import Scenario, Script, Step, assert_exact, sample_cases
from torch import nn

CLASSES = 4
STEPS = 20


def classifier(make_optimizer, make_schedulers=lambda _: []):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, CLASSES))
    optimizer = make_optimizer(model)
    schedulers = make_schedulers(optimizer)
    return Script(
        modules={"model": model},
        steps=[Step(function=lambda x, y: F.cross_entropy(model(x), y), optimizer=optimizer)],
        after_batch=lambda: [scheduler.step() for scheduler in schedulers],
    )


def vectors(rows):
    return torch.randn(rows, 6), torch.randint(0, CLASSES, (rows,))


def plain_sgd():
    return classifier(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))


def nesterov():
    return classifier(
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    )


def sgd_for_loops():
    return classifier(
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.1, foreach=False)
    )


def step_schedule():
    return classifier(
        lambda model: torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
        lambda optimizer: [torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)],
    )


def one_cycle_schedule():
    return classifier(
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        lambda optimizer: [torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=STEPS + 1)],
    )


def warm_up_then_cosine():
    def schedulers(optimizer):
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=15)
        return [torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [5])]

    return classifier(lambda model: torch.optim.SGD(model.parameters(), lr=0.2), schedulers)


def parameter_groups():
    def groups(model):
        weights = [item for item in model.parameters() if item.dim() > 1]
        others = [item for item in model.parameters() if item.dim() == 1]
        return torch.optim.SGD(
            [
                {"params": weights, "weight_decay": 0.1, "lr": 0.05},
                {"params": others, "momentum": 0.0},
            ],
            lr=0.2,
            momentum=0.9,
        )

    return classifier(groups)


def only_some_parameters():
    return classifier(lambda model: torch.optim.SGD(model[-1].parameters(), lr=0.1))


def adam():
    return classifier(lambda model: torch.optim.Adam(model.parameters(), lr=0.01))


def adamw():
    return classifier(lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, amsgrad=True))


def fused_adamw():
    return classifier(lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))


def adamw_with_groups_and_a_schedule():
    def groups(model):
        return torch.optim.AdamW(
            [{"params": model[0].parameters(), "lr": 0.001}, {"params": model[2:].parameters(), "weight_decay": 0.0}],
            lr=0.01,
        )

    return classifier(groups, lambda optimizer: [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)])


def adagrad():
    return classifier(lambda model: torch.optim.Adagrad(model.parameters(), lr=0.05))


def rmsprop():
    return classifier(lambda model: torch.optim.RMSprop(model.parameters(), lr=0.005, momentum=0.5, centered=True))


def adam_of_attention():
    """The biases of keys have gradients that are zero up to rounding; adaptive optimizers make steps of them."""
    layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
    outer = nn.Linear(6, CLASSES)
    optimizer = torch.optim.Adam([*layer.parameters(), *outer.parameters()], lr=0.01)

    def loss(x, y):
        return F.cross_entropy(outer(layer(x.unsqueeze(1) * torch.ones(4, 1)).mean(1)), y)

    return Script(modules={"layer": layer, "outer": outer}, steps=[Step(function=loss, optimizer=optimizer)])


SCENARIOS = [
    *(
        Scenario(build=build, batch=vectors)
        for build in (
            plain_sgd,
            nesterov,
            sgd_for_loops,
            step_schedule,
            one_cycle_schedule,
            warm_up_then_cosine,
            parameter_groups,
            only_some_parameters,
        )
    ),
    *(
        Scenario(build=build, batch=vectors, rows=(7,) * 10 + (5,) * 10, exact=False)
        for build in (adam, adamw, fused_adamw, adamw_with_groups_and_a_schedule, adagrad, rmsprop, adam_of_attention)
    ),
]


@pytest.mark.ci_sample(2)
@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "workers", "dtype"), sample_cases(SCENARIOS))
def test_parameters_after_twenty_steps_equal_the_plain_scripts(scenario, workers, dtype):
    assert_exact(scenario, workers, dtype)


def test_a_scenario_has_the_declared_number_of_steps():
    assert {len(scenario.rows) for scenario in SCENARIOS} == {STEPS}

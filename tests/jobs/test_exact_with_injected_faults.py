"""The exactness checks detect differences: each of these scripts differs on the workers."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exactness import Scenario, Script, Step, assert_exact
from torch import nn

pytestmark = pytest.mark.slow


def batch(rows):
    return torch.randn(rows, 5), torch.randint(0, 3, (rows,))


def script(*, rate=0.1, scale=1.0, draw=False, adam=False):
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    kind = torch.optim.Adam if adam else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=rate)

    def loss(x, y):
        noise = torch.rand(1) * 0 if draw else 0
        return F.cross_entropy(model(x), y) * scale + noise

    return Script(modules={"model": model}, steps=[Step(function=loss, optimizer=optimizer)])


def another_rate():
    return script(rate=0.1 + 1e-9 * dist.is_initialized())


def another_rate_of_adam():
    return script(rate=0.01 + 1e-9 * dist.is_initialized(), adam=True)


def another_loss():
    return script(scale=1 + 1e-11 * dist.is_initialized())


def another_draw():
    return script(draw=dist.is_initialized())


def another_statistic():
    built = script()
    if dist.is_initialized():
        with torch.no_grad():
            built.modules["model"][1].running_mean[0] = 1e-9
    return built


def another_rank():
    built = script()
    if dist.is_initialized() and dist.get_rank() == 1:
        return Script(
            modules=built.modules,
            steps=built.steps,
            after_batch=lambda: built.modules["model"][2].bias.data.add_(1e-13),
        )
    return built


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (another_rate, "after the last step: model.0.weight"),
        (another_rate_of_adam, "after the last step: off by"),
        (another_loss, "call 0: result 0"),
        (another_draw, "call 0: the generator moved differently"),
        (another_statistic, "after the last step: model.1.running_mean"),
        (another_rank, r"call 1: .* of rank 1 is not rank 0's"),
    ],
)
def test_a_script_that_differs_on_the_workers_is_detected(build, message):
    adaptive = build is another_rate_of_adam
    scenario = Scenario(build=build, batch=batch, rows=(5,) * 4, exact=not adaptive, vanishing=["0.bias"])
    with pytest.raises(AssertionError, match=message):
        assert_exact(scenario, 2, torch.float64)

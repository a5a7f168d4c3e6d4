"""A job whose optimizer was forgotten is warned about once; a job that measures is not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rankless
from rankless.context.world import World
from rankless.errors import ConfigError
from rankless.jobs.job import make_job
from rankless.parallel.mesh import Mesh
from rankless.user_code import display_name


class Script:
    """A model, an optimizer that no job has, and a job without an optimizer."""

    def __init__(self):
        self.notices = []
        self.world = World(mesh=Mesh.solo(), notify=self.notices.append, send_record=lambda _: None)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.job = self.make(lambda features: self.model(features).square().mean(), None)

    def make(self, function, optimizer):
        return make_job(function, model=self.model, optimizer=optimizer, view=None, world=lambda: self.world)

    def call(self, times=3):
        for _ in range(times):
            self.job(torch.ones(4, 3))


def test_a_forgotten_optimizer_is_warned_about_once():
    script = Script()
    script.call(1)
    assert script.notices == []
    script.call(3)
    (notice,) = script.notices
    line = f"{display_name(__file__)}:{script.job.definition.function.__code__.co_firstlineno}"
    assert f"{line}: job '<lambda>' has no opt" in notice


def evaluates(script):
    script.model.eval()
    script.call()


def evaluates_without_gradients(script):
    with torch.no_grad():
        script.call()


def trains_by_itself(script):
    for _ in range(3):
        script.optimizer.zero_grad()
        F.mse_loss(script.model(torch.ones(4, 3)), torch.ones(4, 2)).backward()
        script.optimizer.step()
        script.call()


def trains_by_another_job(script):
    script.make(lambda features: script.model(features).mean(), script.optimizer)
    script.call()


def predicts(script):
    script.job = script.make(lambda features: script.model(features), None)
    script.call()


def has_no_optimizer(script):
    del script.optimizer
    script.call()


def is_frozen(script):
    script.model.requires_grad_(False)
    script.call()


RIGHT = [
    evaluates,
    evaluates_without_gradients,
    trains_by_itself,
    trains_by_another_job,
    predicts,
    has_no_optimizer,
    is_frozen,
]


@pytest.mark.parametrize("act", RIGHT, ids=lambda act: act.__name__)
def test_a_job_that_is_meant_to_measure_or_to_predict_is_left_alone(act):
    script = Script()
    act(script)
    assert script.notices == []


def test_a_decorator_without_parentheses_raises_with_the_line_and_the_fix():
    def train(features):
        return features

    with pytest.raises(ConfigError) as raised:
        rankless.job(train)
    assert "@rankless.job without parentheses" in str(raised.value.found)
    assert raised.value.where == f"{display_name(__file__)}:{train.__code__.co_firstlineno}"
    assert raised.value.fix.startswith("write @rankless.job(model=model)")


@pytest.mark.parametrize(("given", "found"), [((), "no model="), ((nn.Linear(1, 1),), "Linear without a name")])
def test_a_decorator_without_a_named_model_raises(given, found):
    with pytest.raises(ConfigError) as raised:
        rankless.job(*given)
    assert found in str(raised.value.found)

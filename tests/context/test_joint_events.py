"""Joint participants, as a process without an agent has them."""

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

import rankless
from rankless.context.extension_participants import JointEvents, JointParticipant
from rankless.errors import ConfigError
from rankless.ownership.modules_with_states_elsewhere import ExtensionModule
from rankless.ownership.state_owner import StateOwner

CLOSED: list[str] = []


class Failing(JointParticipant):
    def close(self) -> None:
        CLOSED.append("failing")
        raise ValueError("no connection")


class Second(JointParticipant):
    def close(self) -> None:
        CLOSED.append("second")


def test_all_participants_are_closed_also_if_one_raises_an_error():
    events = JointEvents()
    events._by_module |= {"failing": Failing(), "second": Second()}
    with pytest.raises(ValueError, match="no connection"):
        events.close()
    assert CLOSED == ["failing", "second"]
    events.close()
    assert CLOSED == ["failing", "second"]


class Answering(nn.Module):
    """Finds its attributes in a dict, and raises KeyError for others."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def __getattr__(self, name):
        return {**self.__dict__["_modules"], **self.__dict__["_parameters"]}[name]


def test_a_module_that_answers_other_attributes_in_its_own_way_trains():
    model = Answering()
    train = rankless.job(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))(
        lambda x: model.layer(x).sum()
    )
    before = model.layer.weight.detach().clone()
    train(torch.ones(2, 2))
    assert torch.allclose(model.layer.weight, before - 0.1 * 2)


class Owning(JointParticipant):
    def make_owner(self) -> StateOwner:
        return StateOwner()


class OwnedModule(ExtensionModule):
    rankless_participant = "owning_participant"

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))


def test_a_participant_that_owns_states_cannot_come_with_a_model(monkeypatch):
    module = ModuleType("owning_participant")
    module.make_joint_participant = lambda *_: Owning()
    monkeypatch.setitem(sys.modules, "owning_participant", module)
    model = OwnedModule()
    predict = rankless.job(model=model)(lambda x: model.weight * x)
    with pytest.raises(ConfigError, match="owning_participant, which only a model names"):
        predict(torch.ones(2))

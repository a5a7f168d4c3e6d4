"""Joint participants, as a process without an agent has them."""

import pytest
import torch
from torch import nn

import rankless
from rankless.context.joint_events import JointEvents, JointParticipant

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

"""A job of a method: refused on the class, correct on an object."""

import pytest
import torch
from torch import nn

import rankless
from rankless.errors import ConfigError

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

"""A job and a loader that have run can be copied: what they are made of, not what belongs to a process."""

import copy
from collections.abc import Callable
from typing import Annotated, Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, WeightedRandomSampler

import rankless
from rankless.errors import ConfigError

INPUTS = torch.arange(12.0).reshape(4, 3) / 12
DATA = TensorDataset(INPUTS)


def carried(value: Any) -> Any:
    """What another process gets."""
    return cloudpickle.loads(cloudpickle.dumps(value))


class Trainer:
    """A model, an optimizer and a job that has been called."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.train = rankless.job(model=self.model, optimizer=self.optimizer, **options)(self.loss)
        self.train(INPUTS)

    def loss(self, inputs: Annotated[Tensor, rankless.Whole((None, 3), torch.float32)]) -> Tensor:
        return self.model(inputs).square().mean()


@pytest.mark.parametrize(
    "options", [{}, {"clip_norm": 0.1, "check_finite": True}, {"batch_dims": {"inputs": 0}}], ids=str
)
def test_a_job_that_was_called_is_carried_with_its_model_and_its_optimizer(options: dict[str, Any]):
    here = Trainer(**options)
    there = carried(here)
    definition = there.train.definition
    assert (definition.modules["model"], definition.optimizers) == (there.model, (there.optimizer,))
    assert (there.train.was_called, there.train.stepped) == (False, False)
    assert [there.train(INPUTS).item() for _ in range(3)] == [here.train(INPUTS).item() for _ in range(3)]
    assert all(
        torch.equal(one, other) for one, other in zip(here.model.parameters(), there.model.parameters(), strict=True)
    )
    untouched = copy.deepcopy(here.train)
    here.train(INPUTS)
    assert untouched(INPUTS).item() == there.train(INPUTS).item()


def test_a_job_with_accumulated_gradients_is_not_carried_without_them():
    trainer = Trainer(accumulate=2)
    with pytest.raises(ConfigError, match=r"call loss\.flush\(\) after the loop"):
        carried(trainer.train)
    trainer.train.flush()
    assert carried(trainer).train(INPUTS).item() == trainer.train(INPUTS).item()
    trainer.train.flush()


LOADERS: dict[str, Callable[[], rankless.Loader[Any]]] = {
    "shuffled": lambda: rankless.loader(DATA, 2, shuffle=True, seed=5),
    "with a generator": lambda: rankless.loader(
        DATA, 2, shuffle=True, generator=torch.Generator(torch.get_default_device()).manual_seed(3)
    ),
    "with a sampler": lambda: rankless.loader(DATA, 2, sampler=WeightedRandomSampler([1.0, 2.0, 3.0, 4.0], 4)),
    "with readers": lambda: rankless.loader(DATA, 2, num_workers=1, persistent_workers=True),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(name, marks=[] if name == "shuffled" else pytest.mark.exhaustive) for name in LOADERS]
)
def test_a_loader_that_was_iterated_is_carried_and_begins_a_new_pass(kind: str):
    loader = LOADERS[kind]()
    assert len(list(loader)) == 2
    there = carried(loader)
    assert there.epoch == 1
    states = torch.get_rng_state()
    wanted = [batch[0] for batch in loader]
    torch.set_rng_state(states)
    found = [batch[0] for batch in there]
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
    next(iter(loader))
    assert len(list(carried(loader))) == 2


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_function_with_a_job_and_a_loader_that_ran_here_trains_on_two_processes():
    trainer = Trainer()
    loader = rankless.loader(DATA, 2, shuffle=True, seed=5)
    list(loader)

    def fit(_rank: int) -> tuple[list[float], dict[str, Tensor]]:
        return [trainer.train(batch).item() for (batch,) in loader], trainer.model.state_dict()

    (losses, state), (others, _) = rankless.spawn(cloudpickle.loads(cloudpickle.dumps(fit)), nprocs=2)
    assert losses == others
    assert losses == pytest.approx([trainer.train(batch).item() for (batch,) in loader], rel=1e-5)
    torch.testing.assert_close(state, trainer.model.state_dict())

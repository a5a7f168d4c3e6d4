"""Does with tables what scripts do beside training them, and prints the rows at the end of each case as JSON."""

import copy
import json
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import rankless
from rankless.parameter_server import ByCount, ByHash, Embedding

torch.set_default_dtype(torch.float64)
IDS = torch.arange(11) * 10**15


class Training:
    """A model with a table, its optimizers and jobs."""

    def __init__(self, job=None, **table) -> None:
        torch.manual_seed(0)
        self.table, self.layer = Embedding(4, **{"seed": 9, **table}), nn.Linear(4, 1)
        self.model = nn.ModuleList([self.table, self.layer])
        self.optimizers = [
            torch.optim.Adagrad(self.table.parameters(), 0.1),
            torch.optim.AdamW(self.layer.parameters(), 1e-2),
        ]
        model = self.model

        @rankless.job(model=model, optimizer=self.optimizers, **(job or {}))
        def train(ids, targets):
            return F.mse_loss(model[1](model[0](ids)).flatten(), targets)

        @rankless.job(model=model)
        def predict(ids):
            return model[1](model[0](ids))

        self.train, self.predict = train, predict

    def epoch(self, count=5):
        for step in range(count):
            self.train(torch.arange(7) * (step + 3) % 11 * 10**15, torch.arange(7.0))
        return self


def use_predictions(training):
    before = training.epoch().predict(IDS[:5])
    training.epoch()
    assert not torch.equal(before, training.predict(IDS[:5]))


def train_a_copy(training):
    training.epoch()
    copied = copy.deepcopy(training.model)
    training.epoch()
    with torch.no_grad():
        training.copied_rows = copied[0](IDS)


def restore_a_state(training):
    state = copy.deepcopy(training.epoch().model.state_dict())
    training.epoch().model.load_state_dict(state)
    training.epoch()


def save_and_load(training):
    folder = Path(tempfile.gettempdir()) / f"saved-{rankless.world_size()}"
    objects = {"model": training.epoch().model, "optimizer": training.optimizers[0]}
    rankless.save(folder, **objects)
    training.epoch()
    rankless.load(folder, **objects)
    training.epoch()


def restore_one_of_two_models(training):
    """Programs that were made before go on with their own tables, in whatever order these are restored."""
    other = Training(seed=4)
    states = [copy.deepcopy(each.epoch().model.state_dict()) for each in (training, other)]
    training.epoch().model.load_state_dict(states[0])
    other.epoch()
    training.epoch()
    training.model.load_state_dict(states[0])
    other.model.load_state_dict(states[1])
    for each in (other, training):
        each.epoch()
    with torch.no_grad():
        training.copied_rows = other.table(IDS)


def change_the_learning_rate(training):
    training.epoch().optimizers[0].param_groups[0]["lr"] = 0.01
    training.epoch()


def freeze_the_table(training):
    training.epoch().table.weight.requires_grad_(False)
    training.epoch(1)


def freeze_the_layer(training):
    training.layer.requires_grad_(False)
    training.epoch()


def read_on_one_worker(training):
    for _ in range(5):
        training.epoch(1)
        if rankless.rank() == 0:
            with torch.no_grad():
                training.table(IDS)
            repr(training.table), training.table.state_dict(), copy.deepcopy(training.table)


CASES = {
    "admission by count": (Training.epoch, {"admission": ByCount(occurrences=3)}),
    "admission by hash": (Training.epoch, {"admission": ByHash(fraction=0.5)}),
    "expiry": (Training.epoch, {"expire_after_steps": 2}),
    "most rows": (Training.epoch, {"max_rows": 5}),
    "padding": (Training.epoch, {"padding_idx": 3 * 10**15}),
    "check_finite": (Training.epoch, {"job": {"check_finite": True}}),
    "random counter": (Training.epoch, {"job": {"random": "counter"}}),
    **{
        case.__name__: (case, {})
        for case in (
            *(use_predictions, train_a_copy, restore_a_state, restore_one_of_two_models, save_and_load),
            *(change_the_learning_rate, freeze_the_table, freeze_the_layer, read_on_one_worker),
        )
    },
}

for name, (use, settings) in CASES.items():
    training = Training(**settings)
    use(training)
    with torch.no_grad():
        rows = training.table(IDS)
    if rankless.rank() == 0:
        copied = getattr(training, "copied_rows", rows[:0])
        statistics = training.table.statistics()
        counts = [statistics.rows, statistics.created, statistics.expired, statistics.evicted]
        print(json.dumps({"form": name, "losses": counts, "rows": torch.cat([rows, copied]).flatten().tolist()}))

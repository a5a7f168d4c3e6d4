"""Does with sparse embeddings what scripts do beside training them, as jobs or, with --plain, in plain PyTorch.

Prints a line of JSON per case: numbers that the case has seen, and the rows and the optimizer's states at the end.
"""

import argparse
import copy
import io
import json
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--plain", action="store_true")
parser.add_argument("--cases", default="")
parser.add_argument("--skip-momentum", action="store_true", help="PyTorch's buffer is sparse, which checkpoints refuse")
arguments = parser.parse_args()
if not arguments.plain:
    import rankless

torch.set_default_dtype(torch.float64)
ROWS = 11


class Training:
    """A model with two sparse embeddings, and what trains it."""

    def __init__(self, make=torch.optim.Adagrad, before=lambda _: None, **options) -> None:
        torch.manual_seed(0)
        self.words = nn.Embedding(ROWS, 3, sparse=True)
        self.bags = nn.EmbeddingBag.from_pretrained(torch.randn(ROWS, 3), freeze=False, sparse=True, mode="sum")
        self.layer = nn.Linear(3, 1)
        self.model = nn.ModuleList([self.words, self.bags, self.layer])
        before(self)
        parameters = [self.words.weight, self.bags.weight]
        self.optimizers = [make(parameters, **{"lr": 0.1, **options}), torch.optim.AdamW(self.layer.parameters(), 1e-2)]
        self.seen: list[float] = []

        def train(ids, targets):
            return F.mse_loss(self.layer(self.words(ids) + self.bags(ids[:, None])).flatten(), targets)

        def predict(ids):
            return self.layer(self.words(ids))

        self.train, self.predict = self.wrap(train), predict
        if not arguments.plain:
            self.train = rankless.job(model=self.model, optimizer=self.optimizers)(train)
            self.predict = rankless.job(model=self.model)(predict)

    def wrap(self, function):
        def step(*batch):
            loss = function(*batch)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
            return loss.detach()

        return step

    def epoch(self, count=4):
        for step in range(count):
            self.see(self.train(torch.arange(7) * (step + 3) % ROWS, torch.arange(7.0)))

    def see(self, value):
        self.seen += torch.as_tensor(value).detach().double().flatten().tolist()

    def save(self, path, **options):
        if arguments.plain:
            torch.save([each.state_dict() for each in (self.model, *self.optimizers)], path)
        else:
            rankless.save(path, model=self.model, tables=self.optimizers[0], rest=self.optimizers[1], **options)

    def load(self, path):
        if arguments.plain:
            for each, state in zip((self.model, *self.optimizers), torch.load(path), strict=True):
                each.load_state_dict(state)
        else:
            rankless.load(path, model=self.model, tables=self.optimizers[0], rest=self.optimizers[1])

    def states(self) -> list[float]:
        found = [state for each in self.optimizers for state in each.state_dict()["state"].values()]
        values = [value for state in found for _, value in sorted(state.items())]
        return [number for each in values for number in torch.as_tensor(each).to_dense().double().flatten().tolist()]


def folder() -> Path:
    """Return a new folder, the same on all workers."""
    made = tempfile.mkdtemp()
    return Path(made if arguments.plain else rankless.once(lambda: made))


def predict_between(training):
    training.epoch()
    training.see(training.predict(torch.arange(ROWS)))
    training.epoch()
    training.see(training.predict(torch.arange(ROWS)))


def read_in_every_step(training):
    for _ in range(3):
        training.epoch(1)
        training.see(training.words.weight.norm())
        training.see(training.words.weight[3])
        training.see(training.words.weight.grad.to_dense().sum(0))


def keep_a_view(training):
    training.epoch(1)
    view = training.words.weight.data
    for _ in range(3):
        training.epoch(1)
        training.see(view)
        view[2] = 0.25
    training.epoch(1)


def normal_before(training):
    training.words.weight.data.normal_()
    training.epoch()


def normal_between(training):
    training.epoch()
    training.words.weight.data.normal_()
    training.epoch()


def change_rows(training):
    for step in range(3):
        training.epoch(1)
        with torch.no_grad():
            training.words.weight[step] *= 2
            training.bags.weight.clamp_(-0.5, 0.5)


def change_and_predict(training):
    training.epoch(1)
    with torch.no_grad():
        training.words.weight.mul_(3)
        training.see(training.words(torch.arange(4)))
    training.see(training.predict(torch.arange(ROWS)))
    training.epoch(1)


def copy_weights(training):
    training.epoch()
    with torch.no_grad():
        training.words.weight.copy_(torch.arange(ROWS * 3.0).reshape(ROWS, 3) / 20)
        training.bags.weight.copy_(training.words.weight)
    training.epoch()


def copy_models(training):
    training.epoch()
    copied = copy.deepcopy(training.model)
    training.epoch()
    training.see(copied[0].weight)
    training.see(copied[1](torch.tensor([[1, 2]])))


def load_state_dicts(training):
    training.epoch()
    states = copy.deepcopy([each.state_dict() for each in (training.model, *training.optimizers)])
    training.epoch()
    for each, state in zip((training.model, *training.optimizers), states, strict=True):
        each.load_state_dict(state)
    training.epoch()


def store_bytes(training):
    training.epoch()
    file = io.BytesIO()
    torch.save(training.model.state_dict(), file)
    training.epoch()
    file.seek(0)
    training.model.load_state_dict(torch.load(file))
    training.epoch()


def resume(training):
    training.epoch()
    path = folder() / "state"
    training.save(path)
    training.epoch()
    training.load(path)
    training.epoch()
    other = Training(training.make, **training.options)
    other.load(path)
    other.epoch()
    training.see(other.words.weight)
    training.see(torch.tensor(other.states()))


def save_in_the_background(training):
    training.epoch()
    path = folder() / "state"
    training.save(path, **({} if arguments.plain else {"background": True}))
    training.epoch()
    training.load(path)  # waits for the save
    training.see(training.words.weight)


def load_twice(training):
    training.epoch()
    path, second = folder() / "state", folder() / "state"
    training.save(path)
    training.epoch()
    training.save(second)
    training.load(path)
    training.see(training.predict(torch.arange(ROWS)))
    training.load(second)
    training.epoch()


def change_states(training):
    training.epoch()
    for state in training.optimizers[0].state.values():
        for key, value in state.items():
            if key != "step" and value is not None:
                value.mul_(0.5)
    training.epoch()


def clear_states(training):
    training.epoch()
    fresh = training.make([training.words.weight, training.bags.weight], **{"lr": 0.1, **training.options})
    training.optimizers[0].load_state_dict(fresh.state_dict())
    training.epoch()


def freeze_for_a_while(training):
    training.epoch(2)
    training.words.weight.requires_grad_(False)
    training.epoch(2)
    training.words.weight.requires_grad_(True)
    training.epoch(2)


def scale_gradients_in_a_hook(training):
    def halve(optimizer, *_):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad * 0.5

    training.optimizers[0].register_step_pre_hook(halve)
    training.epoch()


def change_the_rate(training):
    training.epoch(2)
    training.optimizers[0].param_groups[0]["lr"] = 0.01
    training.epoch(2)


def use_the_weight_elsewhere(training):
    training.epoch()
    with torch.no_grad():
        training.see(training.words.weight @ training.words.weight[1])
        training.see(F.embedding(torch.tensor([2, 4]), training.words.weight))
        training.see(torch.cdist(training.words.weight, training.bags.weight).topk(2).values)
        training.see(F.embedding_bag(torch.tensor([[2, 4]]), training.words.weight, mode="max"))
    training.epoch()


def train_the_layer_alone(training):
    training.epoch(2)
    rows = torch.arange(4)

    def fit(targets):
        return F.mse_loss(training.layer(training.words(rows).detach()).flatten(), targets)

    call = training.wrap(fit)
    if not arguments.plain:
        call = rankless.job(model=training.model, optimizer=training.optimizers[1])(fit)
    for _ in range(2):
        for parameter in training.model.parameters():
            parameter.grad = None
        training.see(call(torch.arange(4.0)))
    training.epoch(2)


def replace_values(training):
    training.epoch()
    training.words.weight.data = torch.ones(ROWS, 3)
    training.epoch()
    training.see(training.words.weight.sum())


CASES = {name: item for name, item in list(globals().items()) if getattr(item, "__module__", "") == __name__}
for name in ("Training", "folder"):
    del CASES[name]
KINDS = {
    "adagrad": (torch.optim.Adagrad, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "lr": 0.05}),
    "sparse_adam": (torch.optim.SparseAdam, {}),
}
for name, case in CASES.items():
    for kind, (make, options) in KINDS.items():
        if arguments.cases and name not in arguments.cases.split(","):
            continue
        if arguments.skip_momentum and kind == "momentum" and case in (resume, save_in_the_background, load_twice):
            continue
        if name == "change_states" and kind == "momentum":  # PyTorch's is sparse, and may not be coalesced
            continue
        training = Training(make, **options)
        training.make, training.options = make, options
        case(training)
        rows = torch.cat([each.detach().flatten() for each in training.model.parameters()]).tolist()
        found = {"form": f"{name} {kind}", "seen": training.seen, "rows": rows, "states": training.states()}
        if arguments.plain or rankless.rank() == 0:
            print(json.dumps(found))

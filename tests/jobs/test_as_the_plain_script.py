"""What a call returns, leaves in `.grad` and raises on two workers is what the plain script has in the same process."""

from pathlib import Path

import pytest
from support.warm_runs import run_script

pytestmark = pytest.mark.slow

SCRIPT = """
import collections, copy, dataclasses, types
from typing import Any
import attrs
import torch, torch.nn.functional as F
from torch import Tensor, nn
import rankless

torch.set_default_dtype(torch.float64)

@dataclasses.dataclass(frozen=True)
class Inner:
    logits: Tensor
    name: str = "inner"

@dataclasses.dataclass
class Output:
    loss: Tensor
    inner: Inner
    parts: list[Any]
    note: dict[str, Any]

@attrs.frozen
class Attributes:
    values: Tensor
    size: int

class Slots:
    __slots__ = ("kept",)
    def __init__(self, kept): self.kept = kept

class Named(collections.namedtuple("Named", "a b")):
    def total(self): return self.a + self.b

def describe(value):
    if isinstance(value, Tensor):
        return value.detach().clone()
    if dataclasses.is_dataclass(value):
        fields = [item.name for item in dataclasses.fields(value)]
        return type(value).__name__, {name: describe(getattr(value, name)) for name in fields}
    if isinstance(value, Attributes):
        return "Attributes", describe(value.values), value.size
    if isinstance(value, Slots):
        return "Slots", describe(value.kept)
    if isinstance(value, torch.distributions.Normal):
        return "Normal", describe(value.loc), describe(value.scale)
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [describe(item) for item in value]
    if isinstance(value, dict):
        return {key: describe(item) for key, item in value.items()}
    if isinstance(value, types.SimpleNamespace):
        return describe(vars(value))
    return value

def same(one, other):
    if isinstance(one, Tensor):
        return one.shape == other.shape and torch.allclose(one, other, rtol=1e-10, atol=1e-12, equal_nan=True)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=None)
        self.head, self.other = nn.Linear(6, 2), nn.Linear(6, 2)

def forward(net, x):
    z = net.norm(net.body(x))
    loss = F.mse_loss(net.head(z), x[:, :2]) + net.other(z).square().mean()
    weight = net.body.weight
    return Output(
        loss, Inner(z), [weight, weight[1], weight.T, weight.detach(), net.norm.running_mean, net.body.bias + 0],
        {"attrs": Attributes(z.sum(), 3), "slots": Slots(z[0]), "named": Named(z.sum(0), z.mean(0)),
         "space": types.SimpleNamespace(z=z, k=1), "normal": torch.distributions.Normal(z, z.exp())},
    )

def make():
    torch.manual_seed(3)
    net = Net()
    return net, torch.optim.SGD([*net.body.parameters(), *net.norm.parameters(), *net.head.parameters()], lr=0.1)

def train_plainly(batches):
    net, optimizer = make()
    seen, kept = [], []
    for x in batches:
        optimizer.zero_grad()
        result = forward(net, x)
        result.loss.backward()
        optimizer.step()
        kept.append(result)
        seen.append((describe(result), describe(net.other.weight.grad)))
    return seen, describe(kept), describe(dict(net.state_dict()))

def train_with_jobs(batches, **options):
    net, optimizer = make()
    job = rankless.job(model=net, optimizer=optimizer, **options)(lambda x: forward(net, x))
    seen, kept = [], []
    for x in batches:
        result = job(x)
        kept.append(result)
        seen.append((describe(result), describe(net.other.weight.grad)))
    assert not any(a is b for a in kept for b in kept if a is not b)
    return seen, describe(kept), describe(dict(net.state_dict()))

torch.manual_seed(0)
batches = [torch.randn(7, 4) for _ in range(3)]
wanted = train_plainly(batches)
for options in ({}, {"capture": False}, {"zero": "optimizer"}):
    found = train_with_jobs(batches, **options)
    for place, (one, other) in enumerate(zip(found, wanted)):
        print(options, place, same(one, other))

def compare(name, function, x):
    torch.manual_seed(5)
    net = nn.Linear(6, 6)
    plain = copy.deepcopy(net)
    job = rankless.job(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.0))(lambda x: function(net, x))
    torch.manual_seed(11)
    loss = function(plain, x)
    loss.backward()
    state = torch.get_rng_state()
    torch.manual_seed(11)
    found = job(x)
    gradients = same([item.grad for item in net.parameters()], [item.grad for item in plain.parameters()])
    print(name, same(found, loss.detach()) and gradients and torch.equal(state, torch.get_rng_state()))

rows, none = torch.randn(7, 6), torch.randn(0, 6)
compare("conjugate", lambda net, x: torch.complex(net(x), x).conj().mul(1j).imag.sum(), rows)
compare("bernoulli", lambda net, x: (net(x).T * torch.empty_like(x.T).bernoulli_(x.T.sigmoid())).sum(), rows)
def round_to_float8(net, x):
    y = net(x)
    return (y + (y.to(torch.float8_e4m3fn).double() - y).detach()).square().mean()

compare("float8", round_to_float8, rows)
compare("mse_loss", lambda net, x: F.mse_loss(net(x), x), none)
compare("huber_loss", lambda net, x: F.huber_loss(net(x), x) + F.smooth_l1_loss(net(x), x), none)
def choose(net, x):
    return torch.cond(x.sum() > 0, lambda v: v.sin().sum(), lambda v: v.cos().sum(), (net(x),))

compare("cond", choose, rows)
compare("after it", lambda net, x: net(x).square().mean(), rows)
"""


def test_results_gradients_and_errors_are_those_of_the_plain_script(tmp_path: Path) -> None:
    run = run_script(SCRIPT, "-n", "2", folder=tmp_path)
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stdout.splitlines() if line.split()[-1] in ("True", "False") or " True " in line]
    assert len(lines) == 9 + 5 + 2, run.stdout + run.stderr
    assert all("True" in line for line in lines), run.stdout
    assert "job '<lambda>' cannot be one program (a call of cond()" in run.stderr, run.stderr
    assert run.stderr.count("captured") == 0, run.stderr

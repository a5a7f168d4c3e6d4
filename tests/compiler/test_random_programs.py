"""Random chains of operators in lockstep against one device: how rules, redistributions and strategies combine."""

import random

import pytest
import torch
import torch.nn.functional as F
from simulated_ranks import assert_same_as_plain
from torch import nn

STEPS = {
    "turn": lambda x, _: x.t(),
    "gram": lambda x, _: x @ x.t() / x.shape[1],
    "gram of columns": lambda x, _: x.t() @ x / x.shape[0],
    "product with another": lambda x, o: x @ o.t() if o.shape[1] == x.shape[1] else x * 2,
    "outer": lambda x, o: x[:, :1] * o[:, 0][None, :],
    "softmax": lambda x, _: x.softmax(0) + x.log_softmax(1),
    "sum of rows": lambda x, _: x - x.sum(0, keepdim=True) / 3,
    "mean of columns": lambda x, _: x * x.mean(1, keepdim=True),
    "sum of all": lambda x, _: x + x.sum() * x.square().sum() / 50,
    "deviation": lambda x, _: (x - x.mean(0)) / (x.var(0, correction=0) + 1).sqrt(),
    "norm": lambda x, _: x / (x.norm() + 1),
    "largest": lambda x, _: x * x.amax(0) + x.amin(1, keepdim=True) - x.max(),
    "double rows": lambda x, _: torch.cat([x, x.sin()], 0) if x.shape[0] < 40 else x,
    "double columns": lambda x, _: torch.cat([x, x.cos()], 1) if x.shape[1] < 40 else x,
    "halve rows": lambda x, _: x[: max(1, x.shape[0] // 2)],
    "every other column": lambda x, _: x[:, ::2],
    "merge": lambda x, _: x.reshape(-1, 1),
    "flatten": lambda x, _: x.reshape(1, -1),
    "regroup": lambda x, _: x.reshape(2, -1) if x.numel() % 2 == 0 else x,
    "regroup columns": lambda x, _: (
        x.reshape(x.shape[0], 2, -1).transpose(1, 2).flatten(1) if x.shape[1] % 2 == 0 else x
    ),
    "dropout": lambda x, _: F.dropout(x, 0.3),
    "dropout across": lambda x, _: F.dropout(x.t(), 0.3).t(),
    "noise": lambda x, _: x + torch.randn_like(x) * 0.1,
    "layer norm": lambda x, _: F.layer_norm(x, x.shape[1:]),
    "batch norm": lambda x, _: F.batch_norm(x, None, None, training=True, eps=0.1) if x.shape[0] > 1 else x,
    "cumulative": lambda x, _: x.cumsum(0) / x.shape[0] + x.cumsum(1),
    "sort": lambda x, _: x.sort(0)[0] + x.sort(1)[0],
    "rows by index": lambda x, _: x[torch.arange(x.shape[0]) // 2],
    "columns by index": lambda x, _: x[:, torch.arange(x.shape[1] - 1, -1, -1)],
    "gather": lambda x, _: x.gather(1, x.argmax(1, keepdim=True)) + x,
    "where": lambda x, _: torch.where(x > x.mean(), x, x.square()),
    "pad": lambda x, _: F.pad(x, (1, 0, 0, 1)),
    "roll": lambda x, _: x.roll(1, 0),
    "mix": lambda x, o: x + o.sum(0).sum() / 10,
    "mix rows": lambda x, o: x * o[: x.shape[0], :1] if o.shape[0] >= x.shape[0] else x,
    "split and join": lambda x, _: torch.cat(x.chunk(2, 1)[::-1], 1),
    "stack": lambda x, _: torch.stack([x, x.exp()], 1).sum(1),
    "linear of three dims": lambda x, _: F.linear(x[:, None, :].expand(-1, 2, -1), x[:1]).flatten(1),
    "expand": lambda x, _: x[None].expand(2, -1, -1).mean(0),
    "entropy": lambda x, _: x * F.cross_entropy(x, torch.arange(x.shape[0]) % x.shape[1]),
    "detach": lambda x, _: x * x.detach(),
}


@pytest.mark.parametrize(
    "seed", [*range(40), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(40, 600))]
)
def test_a_random_program_is_exact(seed):
    choices = random.Random(seed)
    names = [choices.choice(list(STEPS)) for _ in range(choices.randint(2, 7))]
    rows, columns, ranks = choices.randint(4, 9), choices.choice([3, 4, 6]), choices.choice([2, 3, 4])
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(seed)
        model = nn.Linear(columns, columns)

        def loss(x):
            values = [model(x)]
            for place, name in enumerate(names):
                values.append(STEPS[name](values[-1], values[place // 2]).tanh())
            weights = torch.sin(torch.arange(1.0, values[-1].numel() + 1)).view(values[-1].shape)
            return (values[-1] * weights).sum() + values[0].square().mean(), values[-1]

        assert_same_as_plain(loss, {"model": model}, [torch.randn(rows, columns)], ranks)
    finally:
        torch.set_default_dtype(torch.float32)

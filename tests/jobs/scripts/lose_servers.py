"""Trains two tables and a sparse embedding on servers, kills servers meanwhile, and prints the rows as one digest."""

import hashlib
import sys

import torch
from server_killer import ServerKiller
from torch import nn

import rankless

KILLS, SEED, STEPS = map(int, sys.argv[1:])
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
first, second = (rankless.parameter_server.Embedding(dim, seed=dim) for dim in (8, 4))
third = nn.EmbeddingBag(2000, 4, sparse=True, mode="sum")
layer = nn.Linear(4, 1)
optimizers = [
    torch.optim.SGD(first.parameters(), lr=0.05, momentum=0.9),
    torch.optim.SparseAdam(list(second.parameters()), lr=0.05),
    torch.optim.Adagrad(third.parameters(), lr=0.05),
    torch.optim.AdamW(layer.parameters(), 1e-2),
]
killer = ServerKiller(KILLS, SEED)


@rankless.job(model=nn.ModuleList([first, second, third, layer]), optimizer=optimizers)
def train(ids):
    distances = layer(second(ids // 3)).squeeze(-1) - 1
    return first(ids).square().sum(1).mean() + distances.square().mean() + third(ids[:, None]).square().mean()


generator = torch.Generator().manual_seed(SEED)
for step in range(STEPS):
    train(torch.randint(0, 2000, (256,), generator=generator))
    if step == 2 and rankless.rank() == 0 and KILLS:
        killer.start()
while rankless.rank() == 0 and not killer.is_done:  # the kills go on while this worker reads
    with torch.no_grad():
        first(torch.arange(2000))
if rankless.rank() == 0:
    killer.stop()
    with torch.no_grad():
        rows = torch.cat(
            [first(torch.arange(2000)).flatten(), second(torch.arange(700)).flatten(), third.weight.flatten()]
        )
    print("RESULT", hashlib.sha256(rows.numpy().tobytes()).hexdigest(), killer.killed)

"""Trains on servers that are killed in pairs within a second, and prints a digest of all that training has computed.

A pair begins every few steps, at a random moment of the steps that follow. The next pair waits for it.
"""

import hashlib
import json
import os
import random
import signal
import sys
import threading

import torch
from server_killer import find_servers
from torch import nn

import rankless

PAIRS, SEED, STEPS = map(int, sys.argv[1:])
torch.set_default_dtype(torch.float64)
torch.manual_seed(3)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = rankless.parameter_server.Embedding(4, seed=1)
        self.items = rankless.parameter_server.Embedding(4, seed=2, expire_after_steps=20)
        self.last = nn.Linear(8, 1)

    def forward(self, users, items):
        return self.last(torch.cat([self.users(users), self.items(items)], 1)).squeeze(1)


model = Model()
optimizers = [
    torch.optim.Adagrad([*model.users.parameters(), *model.items.parameters()], lr=0.05),
    torch.optim.Adam(model.last.parameters(), lr=0.01),
]
checkpoints = rankless.checkpoints("series")


@rankless.job(model=model, optimizer=optimizers)
def train(users, items, targets):
    return (model(users, items) - targets).square().mean()


def kill_pair(generator):
    """Kill a server, and then the other one or the same one again, within a second."""
    killed = 0
    threading.Event().wait(generator.uniform(0, 0.3))
    while killed < 2:
        if servers := sorted(find_servers()):
            os.kill(generator.choice(servers), signal.SIGKILL)
            killed += 1
            threading.Event().wait(generator.choice((0, generator.uniform(0, 1))))


batches, kills = torch.Generator().manual_seed(5), random.Random(SEED)
digest = hashlib.sha256()
pair, pairs = None, 0
for step in range(STEPS):
    users, items = (torch.randint(0, 200, (16,), generator=batches) for _ in range(2))
    if rankless.rank() == 0 and pairs < PAIRS and step % (STEPS // PAIRS) == 1:
        if pair is not None:
            pair.join()
        pair = threading.Thread(target=kill_pair, args=(kills,))
        pair.start()
        pairs += 1
    digest.update(str(float(train(users, items, torch.sin(users + items)))).encode())
    if step % 4 == 2:
        digest.update(rankless.once(lambda: model.items.list_rows()["rows"].numpy().tobytes()))
    if step % 5 == 3:
        checkpoints.save(step, model=model, rows=optimizers[0], others=optimizers[1])
if pair is not None:
    pair.join()
for parameter in model.last.parameters():
    digest.update(parameter.detach().numpy().tobytes())
for table in (model.users, model.items):
    digest.update(table.list_rows()["rows"].numpy().tobytes())
if rankless.rank() == 0:
    print("RESULT", json.dumps({"digest": digest.hexdigest(), "killed": 2 * pairs}))

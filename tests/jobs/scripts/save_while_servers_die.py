"""Saves tables on servers that are killed meanwhile. Each checkpoint must give the rows of its step.

Prints the digests of the rows after each save, of the rows that each checkpoint gives, and the number of kills.
"""

import hashlib
import json
import sys

import torch
from server_killer import ServerKiller

import rankless
from rankless.checkpoint import incremental_row_files

KILLS, SEED, SAVES = map(int, sys.argv[1:])
incremental_row_files.LEAST_BYTES = 1 << 14  # small tables, so that saves are many
torch.set_default_dtype(torch.float64)
table = rankless.parameter_server.Embedding(8, seed=8, expire_after_steps=30)
optimizer = torch.optim.Adagrad(table.parameters(), lr=0.05)
killer = ServerKiller(KILLS, SEED)
checkpoints = rankless.checkpoints("series")


@rankless.job(model=table, optimizer=optimizer)
def train(ids):
    return table(ids).square().sum(1).mean()


def digest(state):
    return hashlib.sha256(state["ids"].numpy().tobytes() + state["rows"].numpy().tobytes()).hexdigest()


generator = torch.Generator().manual_seed(SEED)
train(torch.arange(3000))
wanted = []
for save in range(SAVES):
    for _ in range(3):
        train(torch.randint(0, 3100, (64,), generator=generator))
    if save == 1 and rankless.rank() == 0 and KILLS:
        killer.start()
    checkpoints.save(save, table=table)
    wanted.append(digest(table.get_extra_state()))
while rankless.rank() == 0 and not killer.is_done:  # the kills go on while this worker reads
    table.get_extra_state()
found = []
for save in range(SAVES):
    checkpoints.load(save, table=table)
    found.append(digest(table.get_extra_state()))
if rankless.rank() == 0:
    killer.stop()
    print("RESULT", json.dumps({"wanted": wanted, "found": found, "killed": killer.killed}))

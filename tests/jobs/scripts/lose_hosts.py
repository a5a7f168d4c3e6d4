"""Trains two tables in jobs or, with --plain, as `nn.Embedding` in plain PyTorch. Prints losses and rows as JSON.

Rank 0 writes the number of its step into the file `step`. With --kill it kills servers by SIGKILL at these steps, as in
`5:1,9:0`: server 1 after step 5, server 0 after step 9. With --hold it waits after that step for a file `go`.
"""

import argparse
import json
import os
import signal
import threading

import psutil
import torch
import torch.nn.functional as F
from torch import nn

import rankless
from rankless.extensions.servers.config import SERVER

parser = argparse.ArgumentParser()
parser.add_argument("--plain", action="store_true")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--kill", default="")
parser.add_argument("--hold", type=int)
arguments = parser.parse_args()
kills = [tuple(map(int, each.split(":"))) for each in arguments.kill.split(",") if each]
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
IDS = torch.arange(60)
tables = [rankless.parameter_server.Embedding(4, seed=seed) for seed in (1, 2)]
if arguments.plain:
    rows = [table(IDS).detach() for table in tables]
    tables = [nn.Embedding.from_pretrained(each, freeze=False, sparse=True) for each in rows]
layer = nn.Linear(4, 1)
model = nn.ModuleList([*tables, layer])
optimizers = [
    torch.optim.SGD(tables[0].parameters(), 0.05, momentum=0.9),
    torch.optim.SparseAdam(list(tables[1].parameters()), 0.02),
    torch.optim.AdamW(layer.parameters(), 1e-2),
]


def loss_of(ids, targets):
    return F.mse_loss(layer(tables[0](ids) * tables[1](ids // 3)).flatten(), targets)


if arguments.plain:

    def train(ids, targets):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(ids, targets)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss

else:
    train = rankless.job(model=model, optimizer=optimizers)(loss_of)


def kill(server: int) -> None:
    """Kill a server of this run, and wait until it is gone."""
    for process in psutil.process_iter():
        try:
            config = json.loads(process.environ().get(SERVER, "{}"))
        except (psutil.Error, OSError):
            continue
        if config.get("run_id") == os.environ["TORCHELASTIC_RUN_ID"] and config["index"] == server:
            os.kill(process.pid, signal.SIGKILL)
            return
    raise SystemExit(f"no server {server} to kill")


generator, losses = torch.Generator().manual_seed(3), []
for step in range(arguments.steps):
    ids = torch.randint(0, len(IDS), (9,), generator=generator)
    losses.append(float(train(ids, ids / 60)))
    if not arguments.plain and rankless.rank() == 0:
        with open("step.new", "w") as file:
            file.write(f"{step} {os.getpid()}")
        os.replace("step.new", "step")
        for _, server in [each for each in kills if each[0] == step]:
            kill(server)
        while step == arguments.hold and not os.path.exists("go"):
            threading.Event().wait(0.05)
with torch.no_grad():
    rows = torch.cat([tables[0](IDS).flatten(), tables[1](IDS // 3).flatten()])
if arguments.plain or rankless.rank() == 0:
    print(json.dumps([*losses, *rows.tolist()]))

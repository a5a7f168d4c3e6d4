"""Trains two tables on servers, kills servers meanwhile, and prints the rows as one digest."""

import hashlib
import os
import random
import signal
import sys
import threading

import psutil
import torch
from torch import nn

import rankless
from rankless.config.servers import SERVER

KILLS, SEED, STEPS = map(int, sys.argv[1:])
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
first, second = (rankless.parameter_server.Embedding(dim, seed=dim) for dim in (8, 4))
layer = nn.Linear(4, 1)
optimizers = [
    torch.optim.SGD(first.parameters(), lr=0.05, momentum=0.9),
    torch.optim.SparseAdam(list(second.parameters()), lr=0.05),
    torch.optim.AdamW(layer.parameters(), 1e-2),
]
ended = threading.Event()
killed = 0


@rankless.job(model=nn.ModuleList([first, second, layer]), optimizer=optimizers)
def train(ids):
    distances = layer(second(ids // 3)).squeeze(-1) - 1
    return first(ids).square().sum(1).mean() + distances.square().mean()


def find_servers():
    """Return the process ids of this run's servers."""
    own_run = os.environ["TORCHELASTIC_RUN_ID"]
    for process in psutil.process_iter():
        try:
            if own_run in process.environ().get(SERVER, ""):
                yield process.pid
        except (psutil.Error, OSError):
            continue


def kill_servers() -> None:
    """Kill one server after the other, at random moments."""
    global killed
    generator = random.Random(SEED)
    while killed < KILLS and not ended.wait(generator.uniform(0.01, 0.4)):
        if servers := list(find_servers()):
            os.kill(generator.choice(servers), signal.SIGKILL)
            killed += 1


generator = torch.Generator().manual_seed(SEED)
killer = threading.Thread(target=kill_servers)
for step in range(STEPS):
    train(torch.randint(0, 2000, (256,), generator=generator))
    if step == 2 and rankless.rank() == 0 and KILLS:
        killer.start()
while rankless.rank() == 0 and killer.is_alive():  # the kills go on while this worker reads
    with torch.no_grad():
        first(torch.arange(2000))
ended.set()
if rankless.rank() == 0:
    with torch.no_grad():
        rows = torch.cat([first(torch.arange(2000)).flatten(), second(torch.arange(700)).flatten()])
    print("RESULT", hashlib.sha256(rows.numpy().tobytes()).hexdigest(), killed)

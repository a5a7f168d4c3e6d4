"""Counts how often each batch is trained: every call adds 1 to the elements of its samples.

The loss is linear in the parameters, so a step does not depend on the steps before it, and steps of workers may come in
any order. The order of samples is drawn anew in each pass, from a generator that a job with dropout uses, too.
"""

import json
import sys
import time

import torch
import torch.nn.functional as F
from server_killer import ServerKiller
from torch import nn

import rankless

KILLS, FOLDER = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
SAMPLES, EPOCHS = 37, 3


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(SAMPLES))
        self.rows = rankless.parameter_server.Embedding(1, initial=rankless.parameter_server.Constant(value=0.0))

    def forward(self, samples):
        return self.counts[samples].sum() + self.rows(samples * 10**15).sum()


model, noisy = Counter(), nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, maximize=True)
noisy_optimizer = torch.optim.Adam(noisy.parameters())
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


@rankless.job(model=model, optimizer=optimizer)
def train(samples):
    return model(samples), samples.sum()


@rankless.job(model=noisy, optimizer=noisy_optimizer)
def train_with_dropout(samples):
    return noisy(F.dropout(torch.ones(len(samples), 3))).square().mean()


@rankless.job(model=model)
def count(samples):
    return model.counts[samples]


loader = rankless.loader(torch.arange(SAMPLES), batch_size=2, shuffle=True)
killer = ServerKiller(KILLS, 1)
seen, order, is_last = [], [], False
if rankless.rank() == 0 and KILLS:
    killer.start()
epochs = 0
while epochs < EPOCHS or not is_last:
    order = []
    for samples in loader:
        loss, total = train(samples)
        train_with_dropout(samples)
        scheduler.step()
        order += samples.tolist()
        if KILLS:
            time.sleep(0.01)
    epochs += 1
    seen.append(model.counts.sum().item())  # the workers have met
    is_last = rankless.once(lambda: killer.is_done)
if epochs == EPOCHS:
    rankless.save(FOLDER, model=model, optimizer=optimizer)
    rankless.load(FOLDER, model=model, optimizer=optimizer)
    train(torch.arange(3))
counted = count(torch.arange(SAMPLES))
if rankless.rank() == 0:
    killer.stop()
    with torch.no_grad():
        rows = model.rows(torch.arange(SAMPLES) * 10**15).flatten()
    print(
        "RESULT",
        json.dumps(
            {
                "counts": counted.tolist(),
                "rows": rows.tolist(),
                "epochs": epochs,
                "seen": seen,
                "order": order,
                "killed": killer.killed,
                "steps": model.rows.statistics().created,
            }
        ),
    )

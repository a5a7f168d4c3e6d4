"""Measures a step of a worker that trains on batches of its own, with tables on servers, in the mode `async`.

With --waits it waits for the servers after each step, and reads parameters when the next one needs them.
"""

import argparse
import functools
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import rankless
from rankless.parameter_server import Embedding, worker_tables
from rankless.parameter_server.served_parameters import ServedParameters
from rankless.parameter_server.servers.client import ServerClient

FIELDS, IDS, BATCH, STEPS = 2, 100_000, 2048, 40


def make_waiting_client(*arguments: Any, settings: Any, **more: Any) -> ServerClient:
    return ServerClient(*arguments, settings=settings._replace(defers=False), **more)


parser = argparse.ArgumentParser()
parser.add_argument("--waits", action="store_true")
if parser.parse_args().waits:
    worker_tables.ServerClient = make_waiting_client  # type: ignore[assignment,misc]
    ServedParameters.request_early = functools.partialmethod(lambda _: None)  # type: ignore[assignment]

torch.manual_seed(0)
count = BATCH * STEPS
ids = (torch.rand(count, FIELDS) ** 3 * IDS).long()  # few ids are frequent
loader = rankless.loader(TensorDataset(ids, torch.randn(count)), batch_size=BATCH, shuffle=True, seed=3)
tables = nn.ModuleList([Embedding(16) for _ in range(FIELDS)])
dense = nn.Sequential(nn.Linear(16 * FIELDS, 64), nn.ReLU(), nn.Linear(64, 1))
optimizers = [torch.optim.Adagrad(tables.parameters(), 0.05), torch.optim.Adam(dense.parameters(), 1e-3)]


@rankless.job(model=[tables, dense], optimizer=optimizers)
def train(ids, wanted):
    rows = [table(ids[:, field]) for field, table in enumerate(tables)]
    return F.mse_loss(dense(torch.cat(rows, dim=1)).squeeze(1), wanted)


for epoch in range(3):
    if epoch == 1:
        start = time.monotonic()
    for batch, wanted in loader:
        train(batch, wanted)
if rankless.rank() == 0:
    Path("step_seconds").write_text(str((time.monotonic() - start) / (2 * STEPS)))

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

import rankless
from bench.table_models import TableModel, random_samples
from rankless.extensions.servers.service.client import ServerClient
from rankless.extensions.servers.training import worker_tables
from rankless.extensions.servers.training.own_steps import ServedParameters

FIELDS, BATCH, STEPS = 2, 2048, 40


def make_waiting_client(*arguments: Any, settings: Any, **more: Any) -> ServerClient:
    return ServerClient(*arguments, settings=settings._replace(defers=False), **more)


parser = argparse.ArgumentParser()
parser.add_argument("--waits", action="store_true")
if parser.parse_args().waits:
    worker_tables.ServerClient = make_waiting_client  # type: ignore[assignment,misc]
    ServedParameters.request_early = functools.partialmethod(lambda _: None)  # type: ignore[assignment]

torch.manual_seed(0)
count = BATCH * STEPS
loader = rankless.loader(random_samples(count, FIELDS), batch_size=BATCH, shuffle=True, seed=3)
model = TableModel(FIELDS)


@rankless.job(model=model, optimizer=model.make_optimizers())
def train(ids, wanted):
    return F.mse_loss(model(ids), wanted)


for epoch in range(3):
    if epoch == 1:
        start = time.monotonic()
    for batch, wanted in loader:
        train(batch, wanted)
if rankless.rank() == 0:
    Path("step_seconds").write_text(str((time.monotonic() - start) / (2 * STEPS)))

"""Measures blocks of steps that ask servers for the rows of the next batch early, and of steps that do not."""

import argparse
import itertools
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import rankless
from bench.alternating import write_times
from rankless.jobs.programs.early_rows import EarlyRows
from rankless.parameter_server import Embedding

FIELDS, IDS = 8, 100_000

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4096)
parser.add_argument("--pairs", type=int, default=15)
parser.add_argument("--steps", type=int, default=20)
arguments = parser.parse_args()

torch.manual_seed(0)
count = arguments.batch * (arguments.steps + 2)
ids = (torch.rand(count, FIELDS) ** 3 * IDS).long()  # few ids are frequent
loader = rankless.loader(TensorDataset(ids, torch.randn(count)), batch_size=arguments.batch)
tables = nn.ModuleList([Embedding(16) for _ in range(FIELDS)])
dense = nn.Sequential(nn.Linear(16 * FIELDS, 64), nn.ReLU(), nn.Linear(64, 1))
optimizers = [torch.optim.Adagrad(tables.parameters(), 0.05), torch.optim.Adam(dense.parameters(), 1e-3)]


@rankless.job(model=[tables, dense], optimizer=optimizers)
def train(ids, wanted):
    rows = [table(ids[:, field]) for field, table in enumerate(tables)]
    return F.mse_loss(dense(torch.cat(rows, dim=1)).squeeze(1), wanted)


def run_steps() -> None:
    for batch, wanted in itertools.islice(loader, arguments.steps):
        train(batch, wanted).item()


def run_steps_without() -> None:
    with patch.object(EarlyRows, "note_call", lambda *_: None):
        run_steps()


run_steps()
write_times(run_steps, run_steps_without, pairs=arguments.pairs, calls=1, warmup=1)

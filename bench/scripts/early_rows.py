"""Measures blocks of steps that ask servers for the rows of the next batch early, and of steps that do not."""

import argparse
import itertools
from unittest.mock import patch

import torch
import torch.nn.functional as F

import rankless
from bench.alternating import write_times
from bench.table_models import TableModel, random_samples
from rankless.extensions.servers.training.job_tables import EarlyRows

FIELDS = 8

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4096)
parser.add_argument("--pairs", type=int, default=15)
parser.add_argument("--steps", type=int, default=20)
arguments = parser.parse_args()

torch.manual_seed(0)
count = arguments.batch * (arguments.steps + 2)
loader = rankless.loader(random_samples(count, FIELDS), batch_size=arguments.batch)
model = TableModel(FIELDS)


@rankless.job(model=model, optimizer=model.make_optimizers())
def train(ids, wanted):
    return F.mse_loss(model(ids), wanted)


def run_steps() -> None:
    for batch, wanted in itertools.islice(loader, arguments.steps):
        train(batch, wanted).item()


def run_steps_without() -> None:
    with patch.object(EarlyRows, "note_call", lambda *_: None):
        run_steps()


run_steps()
write_times(run_steps, run_steps_without, pairs=arguments.pairs, calls=1, warmup=1)

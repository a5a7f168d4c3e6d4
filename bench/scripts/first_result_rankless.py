"""Computes the first loss of a job, and reports the time."""

import time
from pathlib import Path

import torch
import torch.nn.functional as F

import rankless
from bench.models import GPT, random_text

torch.manual_seed(0)
model = GPT(layers=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


@rankless.job(model=model, optimizer=optimizer)
def train(text, following):
    return F.cross_entropy(model(text).flatten(0, 1), following.flatten())


train(*random_text(rows=16)).item()
if rankless.rank() == 0:
    Path("reached").write_text(str(time.monotonic()))

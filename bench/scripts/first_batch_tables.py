"""Trains on the first batch of a model with two tables, reads a row that the step has changed, and reports the time."""

import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import rankless
from rankless.parameter_server import Embedding

BATCH, FIELDS = 4096, 8

torch.manual_seed(0)
users, items = Embedding(16), Embedding(16)
dense = nn.Sequential(nn.Linear(16 * (1 + FIELDS), 64), nn.ReLU(), nn.Linear(64, 1))
optimizers = [
    torch.optim.Adagrad([*users.parameters(), *items.parameters()], 0.05),
    torch.optim.Adam(dense.parameters(), 1e-3),
]


@rankless.job(model=[users, items, dense], optimizer=optimizers)
def train(user_ids, item_ids, clicked):
    rows = torch.cat([users(user_ids), items(item_ids).flatten(1)], dim=1)
    return F.binary_cross_entropy_with_logits(dense(rows).squeeze(1), clicked)


user_ids = torch.randint(0, 50_000, (BATCH,), device="cpu")
item_ids = torch.randint(0, 200_000, (BATCH, FIELDS), device="cpu")
clicked = torch.randint(0, 2, (BATCH,), device="cpu").float()
train(user_ids, item_ids, clicked).item()
with torch.no_grad():
    users(user_ids[:1])  # waits for the step
if rankless.rank() == 0:
    Path("reached").write_text(str(time.monotonic()))

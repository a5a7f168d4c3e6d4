"""Trains a language model on many lengths or on their mean, and measures the seconds from first to last call."""

import argparse
import json
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import rankless
from bench.models import CHARACTERS, GPT

SHORTEST, LENGTHS = 40, 200

parser = argparse.ArgumentParser()
parser.add_argument("lengths", choices=["varying", "fixed"])
parser.add_argument("--passes", type=int, default=4)
parser.add_argument("--count", type=int, default=LENGTHS)
arguments = parser.parse_args()

torch.manual_seed(0)
model = GPT(layers=4)
model.positions = nn.Embedding(SHORTEST + LENGTHS, 128)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


@rankless.job(model=model, optimizer=optimizer)
def train(text, following):
    return F.cross_entropy(model(text).flatten(0, 1), following.flatten())


varying = list(range(SHORTEST, SHORTEST + arguments.count))
random.Random(0).shuffle(varying)
lengths = varying if arguments.lengths == "varying" else [round(sum(varying) / len(varying))] * len(varying)
batches = [torch.randint(CHARACTERS, (8, length + 1)) for length in lengths]
start = time.perf_counter()
for _ in range(arguments.passes):
    for batch in batches:
        loss = train(batch[:, :-1], batch[:, 1:])
loss.item()
if rankless.rank() == 0:
    Path("seconds.json").write_text(json.dumps(time.perf_counter() - start))

"""A training whose workers you may kill: `rankless run -n 4 --devices cpu recover.py`, then `kill -9` one of its pids.

A copy of another one takes its place. The last line is that of a run without a loss, and of `python recover.py`.
"""

import argparse
import time

import torch
import torch.nn.functional as F
import torch.utils.data
from sklearn.datasets import load_digits
from torch import nn
import rankless

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument(
    "--pause", type=float, default=0.1, help="seconds between two steps, in which you can kill a worker"
)
parser.add_argument("--zero", choices=["optimizer", "gradients", "parameters"], help="with rankless run --copies 1")
arguments = parser.parse_args()

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.data) / 16, torch.tensor(digits.target)
model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


@rankless.job(model=model, optimizer=optimizer, zero=arguments.zero)
def train(images, labels):
    return F.cross_entropy(model(images), labels)


loader = rankless.loader(torch.utils.data.TensorDataset(images, labels), batch_size=64, shuffle=True, seed=0)
for epoch in range(arguments.epochs):
    for step, batch in enumerate(loader):
        loss = train(*batch)
        time.sleep(arguments.pause)
        if step % 10 == 0:
            print(f"epoch {epoch}, step {step:2}: loss {float(loss):.9f}, {rankless.world_size()} workers", flush=True)
print(f"sum of the parameters: {sum(float(item.detach().sum()) for item in model.parameters()):.9f}")

"""Trains a model on samples that follow a rule, as a plain script or with Rankless: what `verify_cost` verifies."""

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset

from bench.models import CHARACTERS, CONTEXT, GPT, LeNet, loss_of

parser = argparse.ArgumentParser()
parser.add_argument("model", choices=["embeddings", "gpt", "lenet"])
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--plain", action="store_true")
arguments = parser.parse_args()

BATCH, ROWS = 32, 1024
torch.manual_seed(0)
if arguments.model == "gpt":
    model: torch.nn.Module = GPT(dropout=0.1)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    starts, rates = torch.randint(CHARACTERS, (ROWS, 1)), torch.randint(1, 5, (ROWS, 1))
    text = (starts + rates * torch.arange(CONTEXT + 1)) % CHARACTERS
    samples = TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())
elif arguments.model == "embeddings":
    hidden = [torch.nn.Linear(512, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)]
    model = torch.nn.Sequential(torch.nn.Embedding(1000, 64), torch.nn.Flatten(), *hidden)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    samples = TensorDataset(torch.randint(1000, (ROWS, 8)), torch.randint(10, (ROWS,)))
else:
    model = LeNet(dropout=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    labels = torch.randint(10, (ROWS,))
    samples = TensorDataset(torch.randn(10, 1, 28, 28)[labels] + 2 * torch.randn(ROWS, 1, 28, 28), labels)


def compute_loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return loss_of(model, inputs, targets)


if arguments.plain:

    def train(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = compute_loss(inputs, targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    batches = DataLoader(samples, batch_size=BATCH, shuffle=True)
else:
    import rankless

    train = rankless.job(model=model, optimizer=optimizer)(compute_loss)
    batches = rankless.loader(samples, batch_size=BATCH, shuffle=True)

for number in range(arguments.steps):
    if number % (ROWS // BATCH) == 0:
        reader = iter(batches)
    loss = train(*next(reader))
print(f"loss {float(loss):.4f}")

"""A small training, which scripts disturb by a value that may differ between processes.

`source` returns the value and prints it. With FIXED in the environment it returns that instead: so plain Python can
repeat what a run has done.
"""

import json
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.set_default_dtype(torch.float64)


def source(make):
    given = os.environ.get("FIXED")
    value = make() if given is None else json.loads(given)
    print("value", json.dumps(value), flush=True)
    return value


def find_place():
    """Return the place of this process among those of its parent: something that differs between processes."""
    own, _, _, parent = open("/proc/self/stat").read().split()[:4]
    return open(f"/proc/{parent}/task/{parent}/children").read().split().index(own)


def make_data(count=22):
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(count, 4, generator=generator)
    return inputs, inputs.sum(1, keepdim=True) + torch.randn(count, 1, generator=generator)


def make_model():
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(5, 1))


def train(
    *, seed=None, rate=0.05, epochs=2, dataset=None, model=None, batch=6, shuffle=True, change=lambda x: x, each=None
):
    """Train, and print losses and a sum of the parameters."""
    if seed is not None:
        torch.manual_seed(seed)
    dataset = TensorDataset(*make_data()) if dataset is None else dataset
    model = make_model() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    for epoch in range(epochs):
        total = 0.0
        for number, (inputs, wanted) in enumerate(DataLoader(dataset, batch_size=batch, shuffle=shuffle)):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(change(inputs)), wanted)
            loss.backward()
            optimizer.step()
            total += loss.item()
            if each is not None and each(epoch, number, loss):
                break
        print(f"epoch {epoch} loss {total:.9f}", flush=True)
    print(f"parameters {sum(item.abs().sum().item() for item in model.parameters()):.9f}", flush=True)
    return model


class Rows(Dataset):
    """A data set in Python, whose rows `change` changes."""

    def __init__(self, change=lambda index, row: row, count=22):
        self.inputs, self.wanted = make_data(count)
        self.change = change

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.change(index, self.inputs[index]), self.wanted[index]

"""Prediction of clicks from numbers and categories, with a wide and a deep part, on data in the form of Criteo's.

    python examples/wide_and_deep.py
    rankless run -n 3 examples/wide_and_deep.py
    rankless run --servers 2 --workers 3 examples/wide_and_deep.py
    rankless run --servers 2 --workers 3 --heter-workers 2 examples/wide_and_deep.py

The script makes the data: 13 numbers and 26 categories per row, and whether there was a click. A category is a hash of
64 bits, of a feature and its value, so that one table holds all features without a list of their values. The wide part
has a weight for each pair of values of some features. The deep part has a vector for each value, which a network reads.
All commands print the same numbers, up to rounding.
"""

import argparse
import itertools
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.data
from sklearn.metrics import roc_auc_score
from torch import nn

import rankless

NUMBERS, CATEGORIES = 13, 26
CROSSED = torch.tensor(list(itertools.combinations(range(5), 2)))  # pairs of features


class WideAndDeep(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.wide = rankless.parameter_server.Embedding(1, initial=rankless.parameter_server.Constant(value=0.0))
        self.deep = rankless.parameter_server.Embedding(dim, initial=rankless.parameter_server.Normal(std=0.05))
        self.layers = nn.Sequential(
            nn.Linear(NUMBERS + CATEGORIES * dim, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
        )
        rankless.parameter_server.mark_dense(self.layers)  # for heterogeneous workers, if the run has some

    def forward(self, numbers, categories):
        left, right = categories[:, CROSSED[:, 0]], categories[:, CROSSED[:, 1]]
        pairs = left * 0x9E3779B97F4A7C1 + right  # a hash again: 64-bit integers wrap around
        vectors = self.deep(categories).flatten(1)
        return self.wide(pairs).sum((1, 2)) + self.layers(torch.cat([numbers, vectors], dim=1)).squeeze(1)


def hash_values(feature, value):
    """Return a number of 64 bits for each value of each feature (the last step of SplitMix64)."""
    mixed = (feature.astype(np.uint64) << np.uint64(32)) + value.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))).view(np.int64)


def make_clicks(rows):
    """Return numbers, categories and clicks of rows. Few values of a feature are frequent, as in Zipf's law."""
    random = np.random.default_rng(0)
    sizes = np.geomspace(8, 50_000, CATEGORIES).astype(np.int64)
    values = (random.zipf(1.3, size=(rows, CATEGORIES)) - 1) % sizes
    numbers = random.normal(size=(rows, NUMBERS))
    scores = 0.3 * numbers @ random.normal(size=NUMBERS) - 1.0
    for size, column in zip(sizes, values.T, strict=True):
        scores += 0.25 * random.normal(size=size)[column]
    for left, right in CROSSED.tolist():
        scores += 0.25 * random.normal(size=(sizes[left], sizes[right]))[values[:, left], values[:, right]]
    clicks = random.random(rows) < 1 / (1 + np.exp(-scores))
    return numbers, hash_values(np.arange(CATEGORIES), values), clicks


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--rows", type=int, default=20_000)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
parser.add_argument("--report", metavar="FILE", help="write losses and metrics as JSON")
arguments = parser.parse_args()

torch.manual_seed(arguments.seed)
torch.set_default_dtype(getattr(torch, arguments.dtype))
device = "cuda" if torch.cuda.is_available() else "cpu"
numbers, categories, clicks = (torch.from_numpy(column) for column in make_clicks(arguments.rows))
data = torch.utils.data.TensorDataset(
    numbers.to(torch.get_default_dtype()), categories, clicks.to(torch.get_default_dtype())
)
test_count = arguments.rows // 10
train_set = torch.utils.data.Subset(data, range(arguments.rows - test_count))
test_set = torch.utils.data.Subset(data, range(arguments.rows - test_count, arguments.rows))
train_loader = rankless.loader(train_set, batch_size=arguments.batch_size, shuffle=True, seed=arguments.seed)
test_loader = rankless.loader(test_set, batch_size=1024)

model = WideAndDeep().to(device)
wide = torch.optim.Adagrad(model.wide.parameters(), lr=0.05)
deep = torch.optim.SparseAdam(list(model.deep.parameters()), lr=2e-3)
layers = torch.optim.AdamW(model.layers.parameters(), lr=1e-3)


@rankless.job(model=model, optimizer=[wide, deep, layers])
def train(numbers, categories, clicks):
    return F.binary_cross_entropy_with_logits(model(numbers, categories), clicks)


@rankless.job(model=model)
def predict(numbers, categories):
    return model(numbers, categories).sigmoid()


report = {"losses": []}
model.train()
for epoch in range(arguments.epochs):
    total = 0.0
    for numbers, categories, clicks in train_loader:
        loss = train(numbers.to(device), categories.to(device), clicks.to(device))
        total += loss.item() * len(clicks)
    report["losses"].append(total / len(train_set))
    print(f"epoch {epoch + 1}: loss {report['losses'][-1]:.4f}")
model.eval()
predicted = [predict(numbers.to(device), categories.to(device)).cpu() for numbers, categories, _ in test_loader]
report["auc"] = roc_auc_score(data.tensors[2][-test_count:], torch.cat(predicted))
rows = {"wide": model.wide.statistics().rows, "deep": model.deep.statistics().rows}
print(f"test: AUC {report['auc']:.4f}; {rows['wide']:,} rows in the wide table, {rows['deep']:,} in the deep one")
if arguments.report:
    rankless.once(Path(arguments.report).write_text, json.dumps({**report, "rows": rows}))

"""Prediction of ratings by matrix factorization and a small network, with tables of users and items.

    python examples/recommend.py
    python examples/recommend.py --ratings ml-100k.inter
    rankless run -n 3 examples/recommend.py
    rankless run --servers 2 --workers 3 examples/recommend.py
    rankless run --servers 2 --workers 3 --heter-workers 2 examples/recommend.py

`--ratings` takes the ratings of MovieLens-100k: `u.data`, or `ml-100k.inter` as RecBole distributes it. Without it the
script makes a sample. A row of a table is a vector and a bias. An id gets its row in the first step that has it. The
workers of a run share the tables. Servers hold them if the run has some. All commands print the same numbers, up to
rounding.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.data
from sklearn.metrics import roc_auc_score
from torch import nn

import rankless


class Recommender(nn.Module):
    def __init__(self, mean, dim=16):
        super().__init__()
        self.users = rankless.parameter_server.Embedding(dim + 1, initial=rankless.parameter_server.Normal(std=0.05))
        self.items = rankless.parameter_server.Embedding(dim + 1, initial=rankless.parameter_server.Normal(std=0.05))
        self.layers = nn.Sequential(nn.Linear(2 * dim, 32), nn.ReLU(), nn.Linear(32, 1))
        rankless.parameter_server.mark_dense(self.layers)  # for heterogeneous workers, if the run has some
        self.mean = mean

    def forward(self, users, items):
        user, item = self.users(users), self.items(items)
        biases = self.mean + user[:, -1] + item[:, -1]
        user, item = user[:, :-1], item[:, :-1]
        return biases + (user * item).sum(-1) + self.layers(torch.cat([user, item], dim=-1)).squeeze(-1)


def read_ratings(file):
    """Return users, items and ratings of a tab-separated file. The first line may name the columns, as RecBole does."""
    lines = [line.split("\t") for line in Path(file).read_text(encoding="utf-8").splitlines() if line]
    names = [name.partition(":")[0] for name in lines[0]]
    places = [0, 1, 2]
    if "rating" in names:
        places = [names.index(name) for name in ("user_id", "item_id", "rating")]
        lines = lines[1:]
    users, items, ratings = ([line[place] for line in lines] for place in places)
    return np.array(users, np.int64), np.array(items, np.int64), np.array(ratings, np.float64)


def make_ratings(users=600, items=400, count=20_000):
    """Return users, items and ratings by hidden vectors. Few items have many ratings, as in Zipf's law."""
    random = np.random.default_rng(0)
    chances = 1 / np.arange(1, items + 1) ** 0.8
    drawn = random.integers(users, size=2 * count) * items + random.choice(items, 2 * count, p=chances / chances.sum())
    user, item = np.divmod(random.permutation(np.unique(drawn))[:count], items)
    user_vectors, item_vectors = random.normal(size=(users, 4)), random.normal(size=(items, 4)) / 3
    scores = 3.4 + random.normal(size=users)[user] / 3 + random.normal(size=items)[item] / 2
    scores += (user_vectors[user] * item_vectors[item]).sum(1) + random.normal(size=count) / 2
    return user, item, scores.round().clip(1, 5)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ratings", metavar="FILE", help="u.data or ml-100k.inter of MovieLens-100k")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
parser.add_argument("--report", metavar="FILE", help="write losses and metrics as JSON")
arguments = parser.parse_args()

torch.manual_seed(arguments.seed)
torch.set_default_dtype(getattr(torch, arguments.dtype))
device = "cuda" if torch.cuda.is_available() else "cpu"
if arguments.ratings:
    columns = read_ratings(arguments.ratings)
else:
    columns = make_ratings()
    print("no --ratings: a synthetic sample")
users, items, ratings = (torch.from_numpy(column) for column in columns)
ratings = ratings.to(torch.get_default_dtype())
print(f"{len(ratings):,} ratings, {len(users.unique()):,} users, {len(items.unique()):,} items")
order = torch.randperm(len(ratings), generator=torch.Generator().manual_seed(1))
parts = [
    torch.utils.data.TensorDataset(users[part], items[part], ratings[part])
    for part in order.tensor_split([len(ratings) * 9 // 10])
]
train_loader = rankless.loader(parts[0], batch_size=arguments.batch_size, shuffle=True, seed=arguments.seed)
test_loader = rankless.loader(parts[1], batch_size=1024)

model = Recommender(mean=parts[0].tensors[2].mean().item()).to(device)
tables = torch.optim.Adagrad([*model.users.parameters(), *model.items.parameters()], lr=0.05)
layers = torch.optim.AdamW(model.layers.parameters(), lr=1e-3)


@rankless.job(model=model, optimizer=[tables, layers])
def train(users, items, ratings):
    return F.mse_loss(model(users, items), ratings)


@rankless.job(model=model)
def predict(users, items):
    return model(users, items)


report = {"losses": []}
model.train()
for epoch in range(arguments.epochs):
    total = 0.0
    for users, items, ratings in train_loader:
        loss = train(users.to(device), items.to(device), ratings.to(device))
        total += loss.item() * len(ratings)
    report["losses"].append(total / len(parts[0]))
    print(f"epoch {epoch + 1}: loss {report['losses'][-1]:.4f}")
model.eval()
predicted = torch.cat([predict(users.to(device), items.to(device)).cpu() for users, items, _ in test_loader])
wanted = parts[1].tensors[2]
report["rmse"] = F.mse_loss(predicted, wanted).sqrt().item()
report["rmse_of_mean"] = F.mse_loss(torch.full_like(wanted, model.mean), wanted).sqrt().item()
report["auc"] = roc_auc_score(wanted >= 4, predicted)
print(f"test: RMSE {report['rmse']:.4f} (of the mean rating {report['rmse_of_mean']:.4f}), AUC {report['auc']:.4f}")
if arguments.report:
    rankless.once(Path(arguments.report).write_text, json.dumps(report))

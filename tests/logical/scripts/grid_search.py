import itertools
import json

import torch
from sklearn.datasets import load_iris
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

X, Y = load_iris(return_X_y=True)
data = TensorDataset(torch.tensor(X, dtype=torch.float), torch.tensor(Y))
GRID = {"lr": [0.1, 0.01], "hidden": [8, 16], "batch_size": [16, 50]}


def build(hidden):
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3))


def run_trial(lr, hidden, batch_size, epochs=2):
    torch.manual_seed(0)
    train, val = random_split(data, [0.8, 0.2])
    model = build(hidden)
    opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()
    for _ in range(epochs):
        for x, y in DataLoader(train, batch_size, shuffle=True):
            loss = loss_fn(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
    with torch.no_grad():
        x, y = next(iter(DataLoader(val, len(val))))
        out = model(x)
        return {"val_loss": loss_fn(out, y).item(), "accuracy": (out.argmax(1) == y).double().mean().item()}, model


best, best_loss, table = None, float("inf"), []
for values in itertools.product(*GRID.values()):
    config = dict(zip(GRID, values))
    result, model = run_trial(**config)
    table.append({**config, **result})
    print(config, "->", result)
    if result["val_loss"] < best_loss:
        best, best_loss = config, result["val_loss"]
        torch.save(model.state_dict(), "best.pt")
with open("results.json", "w") as f:
    json.dump({"best": best, "trials": table}, f, indent=2)
print("best:", best, best_loss)

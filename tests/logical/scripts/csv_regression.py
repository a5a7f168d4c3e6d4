import csv
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, Dataset

DATA = Path("diabetes.csv")


def write_csv():
    data = load_diabetes()
    with DATA.open("w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow([*data.feature_names, "target"])
        for row, target in zip(data.data, data.target):
            writer.writerow([*(f"{v:.6f}" for v in row), target])


class CSVDataset(Dataset):
    def __init__(self, path):
        with open(path) as f:
            rows = list(csv.DictReader(f))
        self.features = np.array([[float(r[k]) for k in r if k != "target"] for r in rows], dtype=np.float32)
        self.target = np.array([float(r["target"]) for r in rows], dtype=np.float32) / 100

    def __len__(self):
        return len(self.target)

    def __getitem__(self, index):
        return torch.from_numpy(self.features[index]), self.target[index]


def main():
    if not DATA.exists():
        print("writing", DATA)
        write_csv()
    torch.manual_seed(4)
    dataset = CSVDataset(DATA)
    n_train = int(0.8 * len(dataset))
    train_set, test_set = torch.utils.data.random_split(dataset, [n_train, len(dataset) - n_train])
    train_loader, test_loader = DataLoader(train_set, 64, shuffle=True), DataLoader(test_set, 64)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    loss_fn, opt = nn.HuberLoss(), torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(4):
        for X, y in train_loader:
            pred = model(X).squeeze(-1)
            loss = loss_fn(pred, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        mae, ss_res, ss_tot = 0.0, 0.0, 0.0
        with torch.no_grad():
            for X, y in test_loader:
                pred = model(X).squeeze(-1)
                mae += torch.abs(pred - y).sum().item()
                ss_res += ((y - pred) ** 2).sum().item()
                ss_tot += ((y - 1.52) ** 2).sum().item()
        print(f"epoch {epoch}: loss={loss:.12f} MAE={mae / len(test_set):.12f} R2={1 - ss_res / ss_tot:.12f}")
    with open("predictions.csv", "w") as f:
        f.write("index,prediction,target\n")
        with torch.no_grad():
            for i in range(0, 20, 4):
                X, y = test_set[i]
                f.write(f"{i},{model(X).item()!r},{float(y)}\n")
    for name, p in model.named_parameters():
        print(name, p.data.abs().mean().item())


if __name__ == "__main__":
    main()

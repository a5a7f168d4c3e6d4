from collections import Counter

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_classification
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler


class Imbalanced(Dataset):
    def __init__(self, X, y):
        self.X, self.y = X.astype("float32"), y

    def __len__(self):
        return len(self.X)

    def __getitem__(self, i):
        return self.X[i], self.y[i]


class FocalLoss(nn.Module):
    def __init__(self, gamma=2.0, alpha=None):
        super().__init__()
        self.gamma, self.alpha = gamma, alpha

    def forward(self, logits, target):
        ce = F.cross_entropy(logits, target, reduction="none", weight=self.alpha)
        pt = torch.exp(-ce)
        return ((1 - pt) ** self.gamma * ce).mean()


torch.manual_seed(99)
X, y = make_classification(500, 10, n_informative=6, n_classes=3, weights=[0.8, 0.15, 0.05], random_state=5)
train_ds, val_ds = Imbalanced(X[:350], y[:350]), Imbalanced(X[350:], y[350:])
class_counts = Counter(train_ds.y.tolist())
sample_weights = [1.0 / class_counts[int(label)] for label in train_ds.y]
sampler = WeightedRandomSampler(sample_weights, num_samples=len(sample_weights), replacement=True)
train_loader = DataLoader(train_ds, batch_size=48, sampler=sampler)
val_loader = DataLoader(val_ds, batch_size=64)

model = nn.Sequential(nn.Linear(10, 32), nn.LeakyReLU(), nn.Linear(32, 3))
loss_fn = FocalLoss(alpha=torch.tensor([0.5, 1.0, 2.0]))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(3):
    drawn = Counter()
    model.train()
    for xb, yb in train_loader:
        drawn.update(yb.tolist())
        optimizer.zero_grad()
        loss = loss_fn(model(xb), yb)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} drawn {sorted(drawn.items())} loss {loss.item():.12f}")
    model.eval()
    right, seen = torch.zeros(3), torch.zeros(3)
    with torch.no_grad():
        for xb, yb in val_loader:
            pred = model(xb).argmax(dim=1)
            for c in range(3):
                mask = yb == c
                right[c] += (pred[mask] == c).sum()
                seen[c] += mask.sum()
    print("  recall by class", (right / seen).tolist())
print("checksum", [p.norm().item() for p in model.parameters()])

import copy

import torch
from sklearn.datasets import make_moons
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class EMA:
    """Keeps an exponential moving average of the weights of a model."""

    def __init__(self, model, decay=0.9):
        self.decay = decay
        self.shadow = {name: p.data.clone() for name, p in model.named_parameters() if p.requires_grad}
        self.backup = {}

    def update(self, model):
        for name, p in model.named_parameters():
            if p.requires_grad:
                self.shadow[name] = (1.0 - self.decay) * p.data + self.decay * self.shadow[name]

    def apply_shadow(self, model):
        for name, p in model.named_parameters():
            if p.requires_grad:
                self.backup[name] = p.data
                p.data = self.shadow[name]

    def restore(self, model):
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.data = self.backup[name]
        self.backup = {}


torch.manual_seed(21)
X, y = make_moons(430, noise=0.2, random_state=21)
X, y = torch.tensor(X).float(), torch.tensor(y).float().unsqueeze(1)
train_loader = DataLoader(TensorDataset(X[:330], y[:330]), batch_size=32, shuffle=True)
test_loader = DataLoader(TensorDataset(X[330:], y[330:]), batch_size=100)
model = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1), nn.Sigmoid())
mean_teacher = copy.deepcopy(model).requires_grad_(False)
criterion = nn.BCELoss()
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
ema = EMA(model)


def evaluate():
    model.eval()
    with torch.no_grad():
        for x, t in test_loader:
            out = model(x)
            return criterion(out, t).item(), ((out > 0.5) == t).float().mean().item()


for epoch in range(4):
    model.train()
    consistency_total = 0.0
    for x, t in train_loader:
        noisy = x + 0.1 * torch.randn_like(x)
        out = model(x)
        consistency = ((out - mean_teacher(noisy)) ** 2).mean()
        loss = criterion(out, t) + 0.5 * consistency
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
        with torch.no_grad():
            for slow, fast in zip(mean_teacher.parameters(), model.parameters()):
                slow.lerp_(fast, 0.1)
        consistency_total += consistency.item()
    raw = evaluate()
    ema.apply_shadow(model)
    averaged = evaluate()
    ema.restore(model)
    print(f"epoch {epoch} consistency {consistency_total / len(train_loader):.12f} raw {raw} ema {averaged}")
torch.save({"model": model.state_dict(), "ema": ema.shadow}, "ema.pt")

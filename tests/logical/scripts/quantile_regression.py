import numpy as np
import torch
from sklearn.datasets import make_regression
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class QuantileLoss(nn.Module):
    def __init__(self, quantiles):
        super().__init__()
        self.quantiles = quantiles

    def forward(self, preds, target):
        assert not target.requires_grad
        assert preds.size(0) == target.size(0)
        losses = []
        for i, q in enumerate(self.quantiles):
            errors = target - preds[:, i]
            losses.append(torch.max((q - 1) * errors, q * errors).unsqueeze(1))
        return torch.mean(torch.sum(torch.cat(losses, dim=1), dim=1))


class MultiOutput(nn.Module):
    def __init__(self, in_dim, n_quantiles):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(in_dim, 32), nn.ReLU(), nn.Dropout(0.1))
        self.quantile_head = nn.Linear(32, n_quantiles)
        self.sign_head = nn.Linear(32, 1)

    def forward(self, x):
        h = self.trunk(x)
        return {"quantiles": self.quantile_head(h), "sign": self.sign_head(h).squeeze(-1)}


np.random.seed(1)
torch.manual_seed(1)
quantiles = [0.1, 0.5, 0.9]
X, y = make_regression(370, 6, noise=8.0, random_state=1)
X, y = torch.tensor(X, dtype=torch.float32), torch.tensor(y / y.std(), dtype=torch.float32)
train_loader = DataLoader(TensorDataset(X[:300], y[:300]), batch_size=70, shuffle=True)
test_loader = DataLoader(TensorDataset(X[300:], y[300:]), batch_size=35)
model = MultiOutput(6, len(quantiles))
quantile_loss, sign_loss = QuantileLoss(quantiles), nn.BCEWithLogitsLoss()
log_vars = nn.Parameter(torch.zeros(2))  # learned weights of the two tasks
optimizer = torch.optim.Adam([*model.parameters(), log_vars], lr=0.02)
for epoch in range(5):
    model.train()
    for xb, yb in train_loader:
        out = model(xb)
        losses = torch.stack([quantile_loss(out["quantiles"], yb), sign_loss(out["sign"], (yb > 0).float())])
        loss = (torch.exp(-log_vars) * losses + log_vars).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(
        "epoch %d total %.12f parts %s weights %s"
        % (epoch, loss, losses.detach().numpy().tolist(), log_vars.exp().tolist())
    )
model.eval()
covered, widths = 0, []
with torch.no_grad():
    for xb, yb in test_loader:
        low, median, high = model(xb)["quantiles"].unbind(dim=1)
        covered += ((yb >= low) & (yb <= high)).sum().item()
        widths.append((high - low).mean().item())
print("coverage", covered / len(test_loader.dataset), "mean width", np.mean(widths))
torch.save((model.state_dict(), log_vars.detach()), "quantile.pt")

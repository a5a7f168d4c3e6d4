import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
X, y = load_digits(return_X_y=True)
X, y = torch.tensor(X / 16.0).float(), torch.tensor(y)
loader = DataLoader(TensorDataset(X[:500], y[:500]), batch_size=80, shuffle=True)
test_loader = DataLoader(TensorDataset(X[500:700], y[500:700]), batch_size=80)

model = nn.Sequential(
    nn.Linear(64, 48),
    nn.BatchNorm1d(48),
    nn.ReLU(),
    nn.Linear(48, 24),
    nn.BatchNorm1d(24),
    nn.ReLU(),
    nn.Linear(24, 10),
)
swa_model = AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
scheduler = CosineAnnealingLR(optimizer, T_max=6)
swa_start = 3
swa_scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)


def accuracy(net):
    net.eval()
    right, loss = 0, 0.0
    with torch.no_grad():
        for xb, yb in test_loader:
            out = net(xb)
            loss += F.cross_entropy(out, yb, reduction="sum").item()
            right += (out.argmax(1) == yb).sum().item()
    return right / len(test_loader.dataset), loss / len(test_loader.dataset)


for epoch in range(6):
    model.train()
    for input, target in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(input), target)
        loss.backward()
        optimizer.step()
    if epoch > swa_start:
        swa_model.update_parameters(model)
        swa_scheduler.step()
    else:
        scheduler.step()
    print("epoch", epoch, "loss", loss.item(), "lr", optimizer.param_groups[0]["lr"], "test", accuracy(model))

update_bn(loader, swa_model)
print("swa test", accuracy(swa_model))
torch.save(swa_model.state_dict(), "swa.pt")

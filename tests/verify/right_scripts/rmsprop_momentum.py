"""Group norm and a bias before batch norm under RMSprop with momentum; the last batch is smaller."""

import torch
import torch.nn.functional as F
from torch import nn

import rankless

model = nn.Sequential(
    nn.Conv1d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv1d(8, 8, 3), nn.BatchNorm1d(8), nn.ReLU()
)
head = nn.Linear(8, 3)
optimizer = torch.optim.RMSprop([*model.parameters(), *head.parameters()], lr=2e-3, momentum=0.9)
signals, targets = torch.randn(45, 3, 20), torch.randn(45, 3)


@rankless.job(model=[model, head], optimizer=optimizer)
def train(signals, targets):
    return F.mse_loss(head(model(signals).mean(dim=2)), targets)


for _epoch in range(3):
    for batch in rankless.loader(torch.utils.data.TensorDataset(signals, targets), batch_size=10):
        print(train(*batch).item())

"""A bias before batch norm under Adam, with label smoothing and a clipped gradient norm (row V1)."""

import torch
import torch.nn.functional as F
from torch import nn

import rankless

model = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, 6))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=15)
inputs, labels = torch.randn(70, 12), torch.randint(0, 6, (70,))


@rankless.job(model=model, optimizer=optimizer, clip_norm=0.5)
def train(inputs, labels):
    logits = model(inputs)
    return {"loss": F.cross_entropy(logits, labels, label_smoothing=0.1), "hits": (logits.argmax(1) == labels).sum()}


loader = rankless.loader(torch.utils.data.TensorDataset(inputs, labels), batch_size=14, shuffle=True, seed=3)
for _epoch in range(3):
    for batch in loader:
        print(train(*batch)["loss"].item(), train.gradient_norm.item())
        scheduler.step()

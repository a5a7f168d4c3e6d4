"""A script of Lightning Fabric; its argument names a mistake."""

import os
import sys

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

mistake = sys.argv[1]
fabric = Fabric(accelerator="cpu", strategy="ddp", devices=int(os.environ["WORLD_SIZE"]))
fabric.launch()
torch.manual_seed(0)
samples = 42
data = TensorDataset(torch.randn(samples, 5), torch.randn(samples, 1))
layers = [nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 1)] if mistake == "dropout" else [nn.Linear(5, 1)]
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
model, optimizer = fabric.setup(model, optimizer)
batch_size = 14 if mistake == "whole batch" else 14 // fabric.world_size
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=batch_size))
for _epoch in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        fabric.backward(F.mse_loss(model(inputs), targets))
        optimizer.step()

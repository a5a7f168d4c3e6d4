"""A Horovod script; its argument names a mistake."""

import sys

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

mistake = sys.argv[1]
hvd.init()
torch.manual_seed(0)
data = TensorDataset(torch.randn(40, 5), torch.randn(40, 1))
torch.manual_seed(hvd.rank() if mistake == "seeds" else 0)
model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
rate = 0.05 * (hvd.size() if mistake == "learning rate" else 1)
optimizer = torch.optim.SGD(model.parameters(), lr=rate)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
if mistake != "seeds":
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
for _epoch in range(2):
    for inputs, targets in DataLoader(data, batch_size=10 // hvd.size(), sampler=sampler):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()

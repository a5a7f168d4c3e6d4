"""A hand-written DistributedDataParallel script; its argument names a mistake."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

mistake = sys.argv[1]
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,)))
norm = nn.BatchNorm1d(10) if mistake == "batch norm" else nn.LayerNorm(10)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 10), norm, nn.Tanh(), nn.Linear(10, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
sampler = None if mistake == "undivided" else DistributedSampler(data, num_replicas=size, rank=rank, shuffle=True)
batch_size = 12 if mistake in ("whole batch", "undivided") else 12 // size
for epoch in range(2):
    if sampler is not None:
        sampler.set_epoch(epoch)
    for inputs, labels in DataLoader(data, batch_size=batch_size, sampler=sampler):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
dist.destroy_process_group()

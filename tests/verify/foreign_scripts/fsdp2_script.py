"""A hand-written script of FSDP2; its argument names a mistake."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

mistake = sys.argv[1]
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,)))
model = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Tanh(), nn.Linear(10, 3))
group = dist.new_group(list(range(size)))
mesh = DeviceMesh.from_group(group, "cpu")
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = None if mistake == "undivided" else DistributedSampler(data, num_replicas=size, rank=rank, shuffle=True)
batch_size = 12 if mistake in ("whole batch", "undivided") else 12 // size
for epoch in range(2):
    if sampler is not None:
        sampler.set_epoch(epoch)
    for inputs, labels in DataLoader(data, batch_size=batch_size, sampler=sampler):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
dist.destroy_process_group(group)
dist.destroy_process_group()

"""Handwritten digits. The processes rendezvous by the environment, at a TCP address, or through a shared file."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--init_method", default="env://", help="env://, tcp://10.1.1.20:23456, file:///mnt/nfs/sharedfile")
parser.add_argument("--rank", type=int, default=int(os.environ["RANK"]))
parser.add_argument("--world_size", type=int, default=int(os.environ["WORLD_SIZE"]))
args = parser.parse_args()

# Returns once all `world_size` processes have joined.
dist.init_process_group("gloo", init_method=args.init_method, world_size=args.world_size, rank=args.rank)
torch.manual_seed(3)

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
train_set = TensorDataset(images, torch.tensor(digits.target))
sampler = DistributedSampler(train_set)
model = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for images, labels in DataLoader(train_set, batch_size=100, sampler=sampler):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    dist.all_reduce(mean := loss.detach() / args.world_size)
    if args.rank == 0:
        print(f"epoch {epoch}: loss {mean.item()!r}")
dist.destroy_process_group()

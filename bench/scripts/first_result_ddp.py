"""Computes the first loss under DistributedDataParallel and torch.compile, and reports the time."""

import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from bench.models import GPT, random_text

dist.init_process_group("gloo")
torch.manual_seed(0)
parallel = DistributedDataParallel(GPT(layers=4))
model = torch.compile(parallel, backend="aot_eager")
optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
text, following = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in random_text(rows=16))
loss = F.cross_entropy(model(text).flatten(0, 1), following.flatten())
loss.backward()
optimizer.step()
loss.item()
if dist.get_rank() == 0:
    Path("reached").write_text(str(time.monotonic()))
dist.destroy_process_group()

"""Two halves of a job train separate models at the same time, and compare them at the end."""

import horovod.torch as hvd
import torch
from torch import nn

even_set = hvd.ProcessSet([0, 2])
odd_set = hvd.ProcessSet([1, 3])
hvd.init(process_sets=[even_set, odd_set])
assert hvd.size() == 4, "run me with -np 4"

own_set = even_set if even_set.included() else odd_set
target = 1.0 if own_set is even_set else -1.0

torch.manual_seed(hvd.rank())
model = nn.Linear(8, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for parameter in model.parameters():
    hvd.broadcast_(parameter.data, root_rank=own_set.ranks[0], process_set=own_set)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), process_set=own_set)

generator = torch.Generator().manual_seed(100 + hvd.rank())
for _ in range(100):
    inputs = torch.randn(16, 8, generator=generator, dtype=torch.float64)
    optimizer.zero_grad()
    loss = (model(inputs) - target * inputs.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()

weights = hvd.allgather(model.weight.detach())
if hvd.rank() == 0:
    print(
        f"ranks {even_set.ranks} learnt {weights[0].mean().item():+.2f}, equal: {torch.equal(weights[0], weights[2])}"
    )
    print(f"ranks {odd_set.ranks} learnt {weights[1].mean().item():+.2f}, equal: {torch.equal(weights[1], weights[3])}")

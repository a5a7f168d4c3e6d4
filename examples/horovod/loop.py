"""The usual loop: a sampler, a DistributedOptimizer, parameters and optimizer state from rank 0."""

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=32, help="per process")
args = parser.parse_args()

# 1. Initialize Horovod, and give each process its GPU.
hvd.init()
device = torch.device("cpu")
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank())
    device = torch.device("cuda")
torch.manual_seed(42)

digits = load_digits()
images = torch.tensor(digits.data / 16, dtype=torch.float32)
labels = torch.tensor(digits.target)
dataset = TensorDataset(images, labels)

# 2. Each process gets different samples.
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)

# 3. Scale the learning rate by the number of processes, and wrap the optimizer.
optimizer = optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

# 4. Start with rank 0's parameters and optimizer state on every process.
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(args.epochs):
    model.train()
    sampler.set_epoch(epoch)
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.to(device)), target.to(device))
        loss.backward()
        optimizer.step()
    average = hvd.allreduce(loss.detach(), name="avg_loss")
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {average.item():.4f}", flush=True)

# 5. All processes have the same parameters.
flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
everyones = hvd.allgather(flat.unsqueeze(0))
accuracy = (model(images.to(device)).argmax(1).cpu() == labels).float().mean().item()
if hvd.rank() == 0:
    print(f"equal on all {hvd.size()} processes: {bool((everyones == everyones[0]).all())}")
    print(f"accuracy: {accuracy:.3f}", flush=True)

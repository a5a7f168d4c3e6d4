"""Handwritten digits with elastic Horovod: the training continues when workers are killed or hosts change.

    rankless horovodrun -np 2 --min-np 1 --max-np 4 --host-discovery-script ./discover.sh python elastic.py
    rankless horovodrun -np 2 --min-np 1 python elastic.py

`discover.sh` prints the current hosts, one per line, as `localhost:2`.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--batches-per-commit", type=int, default=5)
args = parser.parse_args()

hvd.init()
torch.manual_seed(42)

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
labels = torch.tensor(labels)
train_set, test_set = TensorDataset(images[:1500], labels[:1500]), (images[1500:], labels[1500:])
sampler = hvd.elastic.ElasticSampler(train_set)
loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(256, 64),
    nn.ReLU(),
    nn.Linear(64, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@hvd.elastic.run
def train(state):
    if hvd.rank() == 0:
        print(f"training with {hvd.size()} workers from epoch {state.epoch}", flush=True)
    for state.epoch in range(state.epoch, args.epochs):  # noqa: B020  # as in Horovod's own examples
        for batch, (data, target) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
            state.sampler.record_batch(batch, len(data))
            if batch % args.batches_per_commit == 0:
                state.commit()
            else:
                state.check_host_updates()
        state.sampler.set_epoch(state.epoch + 1)
        if hvd.rank() == 0:
            print(f"epoch {state.epoch}: loss {loss.item():.4f}", flush=True)
    state.epoch = args.epochs


def on_reset():
    for group in optimizer.param_groups:
        group["lr"] = args.lr * hvd.size()


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0, sampler=sampler)
state.register_reset_callbacks([on_reset])
train(state)

with torch.no_grad():
    accuracy = (model(test_set[0]).argmax(1) == test_set[1]).float().mean()
accuracy = hvd.allreduce(accuracy, name="accuracy")
if hvd.rank() == 0:
    print(f"accuracy {accuracy.item():.3f} on {hvd.size()} workers", flush=True)

"""Handwritten digits with DistributedDataParallel, for torchrun or torch.distributed.launch."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch_size", type=int, default=64, help="per process")
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--pretrained", help="a checkpoint of the model")
args = parser.parse_args()


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group(backend="nccl" if cuda else "gloo", init_method="env://")
    rank = dist.get_rank()
    device = torch.device("cuda", args.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(args.local_rank)
    torch.manual_seed(args.seed + rank)

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    train_set = TensorDataset(images, torch.tensor(digits.target))
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)

    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(128, 10)
    )
    if args.pretrained and rank == 0:  # DDP broadcasts it to the other ranks when it wraps the model
        model.load_state_dict(torch.load(args.pretrained))
    model.to(device)
    if cuda:
        model = DDP(model, device_ids=[args.local_rank], output_device=args.local_rank)
    else:
        model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        bar = tqdm(loader, disable=rank != 0)
        for step, (images, labels) in enumerate(bar):
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            bar.set_postfix(loss=loss.item())
            if rank == 0 and step % 5 == 0:
                print(f"epoch {epoch} step {step}: loss {loss.item()!r}")
        if rank == 0:
            torch.save(model.module.state_dict(), "%d.ckpt" % epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

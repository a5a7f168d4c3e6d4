"""Handwritten digits, ported from Paddle: run it with fleetrun on many devices, or with python on one."""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch_size", type=int, default=64, help="per process")
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--print_step", type=int, default=10)
args = parser.parse_args()

trainer_id = int(os.environ.get("PADDLE_TRAINER_ID", 0))
trainers_num = int(os.environ.get("PADDLE_TRAINERS_NUM", 1))


def reader(images, labels, batch_size, **options):
    dataset = TensorDataset(images, labels)
    sampler = DistributedSampler(dataset, num_replicas=trainers_num, rank=trainer_id, **options)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, drop_last=options["drop_last"])


def evaluate(model, loader, device):
    """Return loss and accuracy over the test images of all processes."""
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    model.eval()
    with torch.no_grad():
        for images, labels in loader:
            output, labels = model(images.to(device)), labels.to(device)
            hits = (output.argmax(dim=1) == labels).sum()
            loss = F.cross_entropy(output, labels, reduction="sum")
            sums += torch.stack([loss.double(), hits.double(), hits.new_tensor(len(labels)).double()])
    model.train()
    if trainers_num > 1:
        dist.all_reduce(sums)
    loss, hits, count = sums.tolist()
    return loss / count, hits / count


def main():
    gpu = os.environ.get("FLAGS_selected_gpus", "0" if torch.cuda.is_available() else "")
    device = torch.device(f"cuda:{gpu.split(',')[0]}" if gpu else "cpu")
    if trainers_num > 1:  # fleet.init(is_collective=True)
        if gpu:
            torch.cuda.set_device(device)
        master = f"tcp://{os.environ['PADDLE_MASTER']}"
        backend = os.environ["PADDLE_DISTRI_BACKEND"]
        dist.init_process_group(backend, init_method=master, rank=trainer_id, world_size=trainers_num)
    torch.manual_seed(1)

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    train_loader = reader(images[:1536], labels[:1536], args.batch_size, shuffle=True, drop_last=True)
    test_loader = reader(images[1536:1792], labels[1536:1792], 128, shuffle=False, drop_last=False)

    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10))
    model.to(device)
    if trainers_num > 1:  # fleet.distributed_model(model)
        model = DistributedDataParallel(model, device_ids=[device] if gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    start = time.time()
    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)
        epoch_start = time.time()
        for step, (images, labels) in enumerate(train_loader):
            output, labels = model(images.to(device)), labels.to(device)
            loss = F.cross_entropy(output, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % args.print_step == 0:
                acc = (output.argmax(dim=1) == labels).float().mean()
                cost = time.time() - start
                speed = (step + 1) * args.batch_size * trainers_num / (time.time() - epoch_start)
                print(
                    f"epoch {epoch}, step {step}, train_loss: {loss.item():.6f}, acc: {acc.item():.4f}, "
                    f"total time cost: {cost:.2f} s, speed: {speed:.1f} samples/s",
                    flush=True,
                )
        loss, acc = evaluate(model, test_loader, device)
        print(f"epoch {epoch}, test_loss: {loss:.6f}, test_acc: {acc:.4f}", flush=True)
    if trainers_num > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

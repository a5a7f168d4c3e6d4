"""Handwritten digits with Lightning Fabric, under any launcher that Fabric knows, or without one."""

import os

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 2)), strategy="ddp")
    fabric.launch()
    fabric.seed_everything(7)

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    train_set = TensorDataset(images, torch.tensor(digits.target))
    loader = fabric.setup_dataloaders(DataLoader(train_set, batch_size=100, shuffle=True))

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)

    for epoch in range(2):
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        fabric.print(f"epoch {epoch}: loss {fabric.all_reduce(loss.detach(), reduce_op='mean').item()!r}")
    fabric.save("fabric.ckpt", {"model": model, "optimizer": optimizer, "epoch": epoch})
    fabric.print(f"processes: {fabric.world_size}, {type(fabric.strategy.cluster_environment).__name__}")


if __name__ == "__main__":
    main()

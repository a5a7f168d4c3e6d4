"""LeNet or an MLP in the consistent view: a job takes the whole batch as NumPy arrays and returns a loss per sample."""

import argparse
from typing import Annotated

import numpy as np
import rankless
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

BATCH = 100


class LeNet(nn.Sequential):
    def __init__(self, dropout):
        super().__init__(
            nn.Conv2d(1, 32, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 7 * 7, 512),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(512, 10),
        )


class MLP(nn.Sequential):
    def __init__(self, dropout):
        super().__init__(nn.Flatten(), nn.Linear(28 * 28, 512), nn.ReLU(), nn.Dropout(dropout), nn.Linear(512, 10))


def read_digits():
    """Return scikit-learn's 1,797 digits at 28 x 28 pixels, as NumPy arrays: 1,500 to train on, 297 to test."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    images = F.interpolate(images, size=(28, 28), mode="bilinear").numpy()
    order = np.random.RandomState(1).permutation(len(images))
    images, labels = images[order], digits.target.astype(np.int64)[order]
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", choices=["lenet", "mlp"], default="lenet")
parser.add_argument("--dropout", type=float, default=0.5)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--devices", type=int, default=1, help="devices of this host; under rankless run, -n decides")
arguments = parser.parse_args()

torch.manual_seed(0)
(train_images, train_labels), (test_images, test_labels) = read_digits()
model = (LeNet if arguments.model == "lenet" else MLP)(arguments.dropout)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[60, 75], gamma=0.1)


@rankless.job(model=model, optimizer=optimizer, view="consistent")
def train(
    images: Annotated[torch.Tensor, rankless.Whole((BATCH, 1, 28, 28), torch.float32)],
    labels: Annotated[torch.Tensor, rankless.Whole((BATCH,), torch.int64)],
):
    return F.cross_entropy(model(images), labels, reduction="none")


@rankless.job(model=model)
def classify(images):
    return model(images).argmax(dim=1)


rankless.configure(devices_per_host=arguments.devices)
model.to("cuda" if torch.cuda.is_available() else "cpu")
step = 0
for epoch in range(arguments.epochs):
    model.train()
    order = np.random.RandomState(epoch).permutation(len(train_images))
    for start in range(0, len(order), BATCH):
        rows = order[start : start + BATCH]
        loss = train(train_images[rows], train_labels[rows])
        schedule.step()
        step += 1
        if step % 20 == 0:
            print(f"step {step}: loss {loss.mean():.5f}")
model.eval()
found = classify(test_images).cpu().numpy()
print(f"test accuracy {(found == test_labels).mean():.2%}")

"""LeNet on images of ten classes: `plain_lenet.py` for one device, `lenet.py` the same with Rankless."""

import argparse
import gzip
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
import torch.utils.data
from sklearn.datasets import load_digits
from torch import nn

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


class LeNet(nn.Module):
    def __init__(self, side):
        super().__init__()
        self.convolution1 = nn.Conv2d(1, 32, kernel_size=5, padding=2)
        self.norm1 = nn.BatchNorm2d(32)
        self.convolution2 = nn.Conv2d(32, 64, kernel_size=5, padding=2)
        self.norm2 = nn.BatchNorm2d(64)
        self.hidden = nn.Linear(64 * (side // 4) ** 2, 512)
        self.dropout = nn.Dropout(0.5)
        self.output = nn.Linear(512, 10)

    def forward(self, images):
        features = F.max_pool2d(F.relu(self.norm1(self.convolution1(images))), 2)
        features = F.max_pool2d(F.relu(self.norm2(self.convolution2(features))), 2)
        return self.output(self.dropout(F.relu(self.hidden(features.flatten(1)))))


def read_digits():
    """Return scikit-learn's 1,797 handwritten digits at 16 x 16 pixels: 1,500 to train on, 297 to test."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    images = F.interpolate(images, scale_factor=2, mode="bilinear")
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    return [torch.utils.data.TensorDataset(images[part], labels[part]) for part in order.split(1500)]


def read_fashion():
    """Return Fashion-MNIST at 28 x 28 pixels, from Debian's package: 60,000 to train on, 10,000 to test."""
    if not FASHION_MNIST.is_dir():
        sys.exit(f"no folder {FASHION_MNIST}: run `apt install dataset-fashion-mnist`, or use --data digits")
    sets = []
    for name in ("train", "t10k"):
        pixels = gzip.decompress((FASHION_MNIST / f"{name}-images-idx3-ubyte.gz").read_bytes())[16:]
        classes = gzip.decompress((FASHION_MNIST / f"{name}-labels-idx1-ubyte.gz").read_bytes())[8:]
        images = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).reshape(-1, 1, 28, 28) / 255
        sets.append(torch.utils.data.TensorDataset(images, torch.tensor(list(classes), dtype=torch.int64)))
    return sets


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", choices=["digits", "fashion-mnist"], default="digits")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--at-least", type=float, default=0.0, help="fail if the final test accuracy is below this")
arguments = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
train_set, test_set = read_digits() if arguments.data == "digits" else read_fashion()
model = LeNet(side=train_set[0][0].shape[-1]).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[4, 6], gamma=0.1)
order = torch.Generator().manual_seed(0)
train_loader = torch.utils.data.DataLoader(train_set, batch_size=100, shuffle=True, generator=order)
test_loader = torch.utils.data.DataLoader(test_set, batch_size=100)


def train(images, labels):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss


@torch.no_grad()
def correct(images, labels):
    return (model(images).argmax(dim=1) == labels).sum()


accuracy = 0.0
for epoch in range(arguments.epochs):
    model.train()
    for images, labels in train_loader:
        loss = train(images.to(device), labels.to(device))
    scheduler.step()
    model.eval()
    hits = sum(int(correct(images.to(device), labels.to(device))) for images, labels in test_loader)
    accuracy = hits / len(test_set)
    print(f"epoch {epoch + 1}: loss {loss.item():.4f}, test accuracy {accuracy:.2%}")
if accuracy < arguments.at_least:
    sys.exit(f"test accuracy {accuracy:.2%} is below {arguments.at_least:.2%}")

"""Fine-tune a network pretrained on the digits 0 to 4 for the digits 5 to 9: first its head, then all of it."""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset, random_split

import rankless


def get_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pretrained", type=Path, default=Path("trunk.safetensors"))
    parser.add_argument("--pretrain-epochs", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--unfreeze-at", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--head-lr", type=float, default=1e-2)
    parser.add_argument("--trunk-lr", type=float, default=1e-3)
    parser.add_argument("--limit", type=int, default=0)
    return parser.parse_args(argv)


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = False
        self.block1 = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.block2 = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
        self.flatten = nn.Flatten()

    def forward(self, x):
        return self.flatten(self.block2(self.block1(x)))

    def freeze(self):
        self.frozen = True
        for p in self.parameters():
            p.requires_grad = False
        return self.train(self.training)

    def unfreeze(self):
        self.frozen = False
        for p in self.parameters():
            p.requires_grad = True
        return self.train(self.training)

    def train(self, mode=True):
        super().train(mode)
        if self.frozen:  # batch norm keeps its pretrained statistics
            for m in self.modules():
                if isinstance(m, nn.BatchNorm2d):
                    m.eval()
        return self


class Classifier(nn.Module):
    def __init__(self, trunk, classes):
        super().__init__()
        self.trunk = trunk
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, classes))

    def forward(self, x):
        return self.head(self.trunk(x))


def digits_between(low, high, limit):
    data = load_digits()
    chosen = np.flatnonzero((data.target >= low) & (data.target < high))
    if limit:
        chosen = chosen[:limit]
    x = torch.from_numpy(data.images[chosen]).float().unsqueeze(1) / 16
    y = torch.from_numpy(data.target[chosen]).long() - low
    dataset = TensorDataset(x, y)
    n = len(dataset) * 3 // 4
    return random_split(dataset, [n, len(dataset) - n], generator=torch.Generator().manual_seed(0))


def pretrain(args, device):
    train_set, _ = digits_between(0, 5, args.limit)
    model = Classifier(Trunk(), 5).to(device)
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    @rankless.job(model=model, optimizer=optimizer)
    def train(x, y):
        return criterion(model(x), y)

    loader = rankless.loader(train_set, batch_size=args.batch_size, shuffle=True)
    for epoch in range(args.pretrain_epochs):
        total = 0.0
        for x, y in loader:
            total += train(x.to(device), y.to(device)).item()
        print(f"pretraining: epoch {epoch} loss {total / len(loader):.6f}")
    rankless.once(save_file, model.trunk.state_dict(), args.pretrained)


def main():
    args = get_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not args.pretrained.exists():
        pretrain(args, device)
    torch.manual_seed(1)

    trunk = Trunk()
    trunk.load_state_dict(load_file(args.pretrained))
    trunk.freeze()
    model = Classifier(trunk, 5).to(device)
    optimizer = optim.AdamW(model.head.parameters(), lr=args.head_lr)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.02)
    criterion = nn.CrossEntropyLoss()

    train_set, valid_set = digits_between(5, 10, args.limit)
    train_loader = rankless.loader(train_set, batch_size=args.batch_size, shuffle=True, drop_last=True)
    valid_loader = rankless.loader(valid_set, batch_size=args.batch_size)

    @rankless.job(model=model, optimizer=optimizer)
    def train(x, y):
        output = model(x)
        loss = criterion(output, y)
        return loss, (output.argmax(1) == y).float().mean()

    @rankless.job(model=model)
    def validate(x, y):
        output = model(x)
        return criterion(output, y) * len(y), (output.argmax(1) == y).sum()

    history = []
    for epoch in range(args.epochs):
        if epoch == args.unfreeze_at:
            model.trunk.unfreeze()
            # The deeper a layer, the more it is specific to the old task.
            optimizer.add_param_group({"params": model.trunk.block2.parameters(), "lr": args.trunk_lr})
            optimizer.add_param_group({"params": model.trunk.block1.parameters(), "lr": args.trunk_lr / 10})
            scheduler.min_lrs = [0.0] * len(optimizer.param_groups)
            print(f"epoch {epoch}: trunk unfrozen")
        model.train()
        train_loss, train_accuracy = 0.0, 0.0
        for x, y in train_loader:
            loss, accuracy = train(x.to(device), y.to(device))
            train_loss += loss.item() / len(train_loader)
            train_accuracy += float(accuracy) / len(train_loader)
        model.eval()
        valid_loss, valid_hits = 0.0, 0
        for x, y in valid_loader:
            loss, hits = validate(x.to(device), y.to(device))
            valid_loss += loss.item() / len(valid_set)
            valid_hits += int(hits)
        scheduler.step(valid_loss)
        rates = [group["lr"] for group in optimizer.param_groups]
        history.append(valid_loss)
        sys.stdout.write(
            f"epoch {epoch}: train {train_loss:.6f} {train_accuracy:.4f} valid {valid_loss:.6f} "
            f"{valid_hits}/{len(valid_set)} rates {rates}\n"
        )
    best = min(range(len(history)), key=history.__getitem__)
    print(f"best epoch {best}, trunk statistics moved: {model.trunk.block1[1].num_batches_tracked.item()}")


if __name__ == "__main__":
    main()

"""Train a small residual network on handwritten digits with augmentation."""

import argparse
import logging
import math
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import Dataset

import rankless

logger = logging.getLogger("digits")


@dataclass
class Config:
    epochs: int = 15
    batch_size: int = 64
    lr: float = 0.1
    weight_decay: float = 5e-4
    label_smoothing: float = 0.1
    max_norm: float = 1.0
    width: int = 16
    workers: int = 0
    limit: int = 0
    seed: int = 42
    out: str = "digits-run"


class RandomShift:
    def __init__(self, pixels):
        self.pixels = pixels

    def __call__(self, image):
        padded = F.pad(image, [self.pixels] * 4)
        top, left = torch.randint(0, 2 * self.pixels + 1, (2,)).tolist()
        return padded[:, top : top + image.shape[1], left : left + image.shape[2]]


class RandomNoise:
    def __init__(self, std):
        self.std = std

    def __call__(self, image):
        noise = np.random.normal(0.0, self.std, size=tuple(image.shape))
        return (image + torch.from_numpy(noise).float()).clamp(0, 1)


class RandomErase:
    def __init__(self, probability, size):
        self.probability = probability
        self.size = size

    def __call__(self, image):
        if random.random() < self.probability:
            top = random.randrange(image.shape[1] - self.size)
            left = random.randrange(image.shape[2] - self.size)
            image = image.clone()
            image[:, top : top + self.size, left : left + self.size] = image.mean()
        return image


class Digits(Dataset):
    def __init__(self, images, targets, transforms=()):
        self.images = images
        self.targets = targets
        self.transforms = transforms

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = torch.from_numpy(self.images[index]).unsqueeze(0)
        for transform in self.transforms:
            image = transform(image)
        return image, int(self.targets[index])


class BasicBlock(nn.Module):
    def __init__(self, in_channels, out_channels, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out, inplace=True)


class SmallResNet(nn.Module):
    def __init__(self, width, num_classes=10):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.layer1 = BasicBlock(width, width)
        self.layer2 = BasicBlock(width, 2 * width, stride=2)
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(2 * width, num_classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        x = self.layer2(self.layer1(self.stem(x)))
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return self.fc(self.dropout(x))


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def build_datasets(limit):
    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)
    order = np.random.RandomState(0).permutation(len(images))
    if limit:
        order = order[:limit]
    cut = int(len(order) * 0.8)
    augment = [RandomShift(1), RandomNoise(0.05), RandomErase(0.3, 3)]
    train_set = Digits(images[order[:cut]], digits.target[order[:cut]], augment)
    test_set = Digits(images[order[cut:]], digits.target[order[cut:]])
    return train_set, test_set


def build_optimizer(model, config, total_steps):
    decay, no_decay = [], []
    for name, parameter in model.named_parameters():
        (no_decay if parameter.ndim <= 1 or name.endswith(".bias") else decay).append(parameter)
    groups = [{"params": decay, "weight_decay": config.weight_decay}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=0.9, nesterov=True)
    warmup = max(1, total_steps // 10)

    def schedule(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total_steps - warmup)))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)


class AverageMeter:
    def __init__(self):
        self.sum = 0.0
        self.count = 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    @property
    def average(self):
        return self.sum / max(1, self.count)


def evaluate(model, predict, loader, device):
    model.eval()
    losses = AverageMeter()
    correct = torch.zeros(10, dtype=torch.long)
    total = torch.zeros(10, dtype=torch.long)
    for images, labels in loader:
        logits = predict(images.to(device)).cpu()
        losses.update(F.cross_entropy(logits, labels).item(), n=labels.size(0))
        predictions = logits.argmax(dim=1)
        total += torch.bincount(labels, minlength=10)
        correct += torch.bincount(labels[predictions == labels], minlength=10)
    return losses.average, correct, total


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in asdict(Config()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    config = Config(**vars(parser.parse_args()))
    logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
    set_seed(config.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    train_set, test_set = build_datasets(config.limit)
    train_loader = rankless.loader(
        train_set,
        batch_size=config.batch_size,
        shuffle=True,
        num_workers=config.workers,
        seed=config.seed,
        reading="replicated",  # the very random numbers of a DataLoader; without it, others that are as good
    )
    test_loader = rankless.loader(test_set, batch_size=2 * config.batch_size)

    model = SmallResNet(config.width).to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)
    optimizer, scheduler = build_optimizer(model, config, config.epochs * len(train_loader))
    logger.info("%d parameters", sum(p.numel() for p in model.parameters()))

    @rankless.job(model=model, optimizer=optimizer, clip_norm=config.max_norm)
    def train_step(images, labels):
        logits = model(images)
        loss = criterion(logits, labels)
        return loss, (logits.argmax(dim=1) == labels).sum()

    @rankless.job(model=model)
    def predict(images):
        return model(images)

    best_accuracy, best_epoch = 0.0, -1
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    for epoch in range(config.epochs):
        model.train()
        losses, hits, seen, started = AverageMeter(), 0, 0, time.time()
        for images, labels in train_loader:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            loss, hit = train_step(images, labels)
            scheduler.step()
            losses.update(loss.item(), n=images.size(0))
            hits += hit.item()
            seen += len(labels)
        test_loss, correct, total = evaluate(model, predict, test_loader, device)
        accuracy = correct.sum().item() / total.sum().item()
        logger.info("epoch %d took %.1fs", epoch, time.time() - started)
        print(
            f"epoch {epoch}: lr {scheduler.get_last_lr()[0]:.5f} train loss {losses.average:.6f} acc {hits / seen:.4f} "
            f"test loss {test_loss:.6f} acc {accuracy:.4f}"
        )
        if accuracy > best_accuracy:
            best_accuracy, best_epoch = accuracy, epoch
            rankless.save(out / "best", model=model, optimizer=optimizer)
    per_class = " ".join(f"{c}/{t}" for c, t in zip(correct.tolist(), total.tolist(), strict=True))
    print(f"per class: {per_class}")

    rankless.load(out / "best", model=model)
    _, correct, total = evaluate(model, predict, test_loader, device)
    print(f"best: epoch {best_epoch}, accuracy {correct.sum().item() / total.sum().item():.4f} = {best_accuracy:.4f}")


if __name__ == "__main__":
    main()

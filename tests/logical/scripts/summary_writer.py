import csv
import json
import logging
import os
import sys

import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError:  # no TensorBoard here: write the scalars as lines of JSON

    class SummaryWriter:
        def __init__(self, log_dir):
            os.makedirs(log_dir, exist_ok=True)
            self.file = open(os.path.join(log_dir, "events.jsonl"), "w")

        def add_scalar(self, tag, value, step):
            self.file.write(json.dumps({"tag": tag, "value": float(value), "step": step}) + "\n")

        def add_histogram(self, tag, values, step):
            counts = torch.histc(values.detach().float(), 5).int().tolist()
            self.file.write(json.dumps({"tag": tag, "counts": counts, "step": step}) + "\n")

        def close(self):
            self.file.close()


logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
logger = logging.getLogger("train")
handler = logging.FileHandler("train.log", mode="w")
handler.setFormatter(logging.Formatter("%(message)s"))
logger.addHandler(handler)


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n

    @property
    def avg(self):
        return self.sum / self.count


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        maxk = max(topk)
        _, pred = output.topk(maxk, 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0)) for k in topk]


def main():
    torch.manual_seed(6)
    X, y = load_digits(return_X_y=True)
    X, y = torch.tensor(X / 16, dtype=torch.float32), torch.tensor(y)
    train_loader = DataLoader(TensorDataset(X[:400], y[:400]), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10))
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.2, nesterov=True, momentum=0.9)
    writer = SummaryWriter("runs")
    rows = open("metrics.csv", "w", newline="")
    table = csv.DictWriter(rows, ["epoch", "loss", "top1", "top5"])
    table.writeheader()
    step = 0
    for epoch in range(3):
        losses, top1, top5 = AverageMeter(), AverageMeter(), AverageMeter()
        for images, target in train_loader:
            output = model(images)
            loss = criterion(output, target)
            acc1, acc5 = accuracy(output, target, topk=(1, 5))
            losses.update(loss.item(), images.size(0))
            top1.update(acc1[0], images.size(0))
            top5.update(acc5[0], images.size(0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            writer.add_scalar("loss/train", loss, step)
            step += 1
        writer.add_histogram("weights", model[0].weight, epoch)
        table.writerow({"epoch": epoch, "loss": losses.avg, "top1": top1.avg.item(), "top5": top5.avg.item()})
        rows.flush()
        logger.info("epoch %d loss %.12f acc@1 %.8f acc@5 %.8f", epoch, losses.avg, top1.avg, top5.avg)
    writer.close()
    rows.close()
    logger.info("checksum %r", sum(p.sum().item() for p in model.parameters()))


if __name__ == "__main__":
    main()

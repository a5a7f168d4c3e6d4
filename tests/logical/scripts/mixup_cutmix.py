import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

np.random.seed(0)
torch.manual_seed(0)
digits = load_digits()
images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16.0
labels = torch.from_numpy(digits.target)
trainloader = DataLoader(TensorDataset(images[:420], labels[:420]), batch_size=64, shuffle=True)
testloader = DataLoader(TensorDataset(images[420:600], labels[420:600]), batch_size=100)


def mixup_data(x, y, alpha=1.0):
    """Returns mixed inputs, pairs of targets, and lambda"""
    lam = np.random.beta(alpha, alpha) if alpha > 0 else 1
    index = torch.randperm(x.size()[0])
    mixed_x = lam * x + (1 - lam) * x[index, :]
    return mixed_x, y, y[index], lam


def rand_bbox(size, lam):
    W, H = size[2], size[3]
    cut_rat = np.sqrt(1.0 - lam)
    cut_w, cut_h = int(W * cut_rat), int(H * cut_rat)
    cx, cy = np.random.randint(W), np.random.randint(H)
    return (
        np.clip(cx - cut_w // 2, 0, W),
        np.clip(cy - cut_h // 2, 0, H),
        np.clip(cx + cut_w // 2, 0, W),
        np.clip(cy + cut_h // 2, 0, H),
    )


def cutmix_data(x, y, alpha=1.0):
    lam = np.random.beta(alpha, alpha)
    rand_index = torch.randperm(x.size(0))
    bbx1, bby1, bbx2, bby2 = rand_bbox(x.size(), lam)
    x = x.clone()
    x[:, :, bbx1:bbx2, bby1:bby2] = x[rand_index, :, bbx1:bbx2, bby1:bby2]
    lam = 1 - ((bbx2 - bbx1) * (bby2 - bby1) / (x.size(-1) * x.size(-2)))
    return x, y, y[rand_index], lam


def mix_criterion(criterion, pred, y_a, y_b, lam):
    return lam * criterion(pred, y_a) + (1 - lam) * criterion(pred, y_b)


net = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

for epoch in range(2):
    net.train()
    train_loss, correct, total = 0, 0, 0
    for batch_idx, (inputs, targets) in enumerate(trainloader):
        mix = mixup_data if batch_idx % 2 == 0 else cutmix_data
        inputs, targets_a, targets_b, lam = mix(inputs, targets)
        outputs = net(inputs)
        loss = mix_criterion(criterion, outputs, targets_a, targets_b, lam)
        train_loss += loss.item()
        _, predicted = torch.max(outputs.data, 1)
        total += targets.size(0)
        correct += (
            lam * predicted.eq(targets_a.data).cpu().sum().float()
            + (1 - lam) * predicted.eq(targets_b.data).cpu().sum().float()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(
        "Epoch %d Loss: %.12f | Acc: %.10f%% (%.6f/%d)"
        % (epoch, train_loss / (batch_idx + 1), 100.0 * correct / total, correct, total)
    )

net.eval()
with torch.no_grad():
    hits = sum((net(x).argmax(1) == y).sum().item() for x, y in testloader)
print("test accuracy", hits / len(testloader.dataset))
torch.save(net.state_dict(), "mixup.pt")

"""EEGNet on synthetic trials of 8 channels: depthwise and separable convolutions, and max-norm constraints."""

import torch
import torch.nn.functional as F
from torch import nn


class Conv2dWithConstraint(nn.Conv2d):
    def __init__(self, *args, max_norm=1.0, **kwargs):
        self.max_norm = max_norm
        super().__init__(*args, **kwargs)

    def forward(self, x):
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=self.max_norm)
        return super().forward(x)


class LinearWithConstraint(nn.Linear):
    def __init__(self, *args, max_norm=0.25, **kwargs):
        self.max_norm = max_norm
        super().__init__(*args, **kwargs)

    def forward(self, x):
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=self.max_norm)
        return super().forward(x)


class EEGNet(nn.Module):
    def __init__(self, channels=8, samples=64, classes=4, f1=8, depth=2, f2=16, dropout=0.25):
        super().__init__()
        self.temporal = nn.Sequential(
            nn.Conv2d(1, f1, (1, 16), padding="same", bias=False), nn.BatchNorm2d(f1, momentum=0.01, eps=1e-3)
        )
        self.spatial = nn.Sequential(
            Conv2dWithConstraint(f1, f1 * depth, (channels, 1), groups=f1, bias=False, max_norm=1.0),
            nn.BatchNorm2d(f1 * depth, momentum=0.01, eps=1e-3),
            nn.ELU(),
            nn.AvgPool2d((1, 4)),
            nn.Dropout(dropout),
        )
        self.separable = nn.Sequential(
            nn.Conv2d(f1 * depth, f1 * depth, (1, 16), padding=(0, 8), groups=f1 * depth, bias=False),
            nn.Conv2d(f1 * depth, f2, 1, bias=False),
            nn.BatchNorm2d(f2, momentum=0.01, eps=1e-3),
            nn.ELU(),
            nn.AvgPool2d((1, 8)),
            nn.Dropout(dropout),
        )
        self.classifier = LinearWithConstraint(f2 * (samples // 32), classes, max_norm=0.25)

    def forward(self, trials):
        features = self.separable(self.spatial(self.temporal(trials.unsqueeze(1))))
        return self.classifier(features.flatten(1))


torch.manual_seed(0)
labels = torch.randint(0, 4, (150,))
waves = torch.sin(torch.arange(64) * (0.2 + 0.15 * labels[:, None]) + 6 * torch.rand(150, 1))
trials = waves[:, None] * torch.rand(1, 8, 1) + 0.5 * torch.randn(150, 8, 64)
train_set = torch.utils.data.TensorDataset(trials[:106], labels[:106])
valid_set = torch.utils.data.TensorDataset(trials[106:], labels[106:])
loader = torch.utils.data.DataLoader(train_set, batch_size=32, shuffle=True)
valid_loader = torch.utils.data.DataLoader(valid_set, batch_size=32)
model = EEGNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)


def train(trials, labels):
    loss = F.cross_entropy(model(trials), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


@torch.no_grad()
def count_correct(trials, labels):
    return (model(trials).argmax(dim=1) == labels).sum()


for epoch in range(2):
    model.train()
    total = 0.0
    for trials, labels in loader:
        total += train(trials, labels).item() * len(trials)
    model.eval()
    correct = sum(count_correct(trials, labels).item() for trials, labels in valid_loader)
    print(f"epoch {epoch + 1}: loss {total / len(train_set):.4f}, {correct} of {len(valid_set)} correct")

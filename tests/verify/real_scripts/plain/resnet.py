"""A bottleneck ResNet in channels_last memory with fused AdamW, a one-cycle schedule and label smoothing."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride=1):
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        nn.init.zeros_(self.bn3.weight)
        self.downsample = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        hidden = F.relu(self.bn1(self.conv1(x)), inplace=True)
        hidden = F.relu(self.bn2(self.conv2(hidden)), inplace=True)
        return F.relu(self.bn3(self.conv3(hidden)) + self.downsample(x), inplace=True)


class ResNet(nn.Module):
    def __init__(self, width=8, classes=10):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.layer1 = nn.Sequential(Bottleneck(width, width), Bottleneck(4 * width, width))
        self.layer2 = nn.Sequential(Bottleneck(4 * width, 2 * width, stride=2), Bottleneck(8 * width, 2 * width))
        self.pool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(8 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        return self.fc(torch.flatten(self.pool(self.layer2(self.layer1(self.stem(x)))), 1))


torch.manual_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.images[:214], dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target[:214])
train_set = torch.utils.data.TensorDataset(images[:150], labels[:150])
test_set = torch.utils.data.TensorDataset(images[150:], labels[150:])
loader = torch.utils.data.DataLoader(train_set, batch_size=48, shuffle=True)
test_loader = torch.utils.data.DataLoader(test_set, batch_size=48)
model = ResNet().to(memory_format=torch.channels_last)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05, fused=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=2 * len(loader))


def train(images, labels):
    images = images.to(memory_format=torch.channels_last)
    loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss


@torch.no_grad()
def count_correct(images, labels):
    return (model(images.to(memory_format=torch.channels_last)).argmax(dim=1) == labels).sum()


for epoch in range(2):
    model.train()
    for images, labels in loader:
        loss = train(images, labels)
        scheduler.step()
    model.eval()
    correct = sum(int(count_correct(images, labels)) for images, labels in test_loader)
    print(f"epoch {epoch + 1}: loss {loss.item():.4f}, {correct} of {len(test_set)} correct")

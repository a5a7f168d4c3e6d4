"""A convolution with a bias before batch norm, dropout and AdamW: the bias gets only rounding as gradient (row V1)."""

import torch
import torch.nn.functional as F
from torch import nn

import rankless

model = nn.Sequential(
    nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 5)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
images, labels = torch.randn(61, 1, 8, 8), torch.randint(0, 5, (61,))


@rankless.job(model=model, optimizer=optimizer)
def train(images, labels):
    return F.cross_entropy(model(images), labels)


@rankless.job(model=model)
def count_correct(images, labels):
    return (model(images).argmax(dim=1) == labels).sum()


loader = rankless.loader(torch.utils.data.TensorDataset(images, labels), batch_size=16, shuffle=True)
for _epoch in range(3):
    model.train()
    for batch in loader:
        train(*batch)
    model.eval()
    print(count_correct(images, labels).item())

"""An exponential average of the model, deep-copied, updated by the script and evaluated outside jobs (row V3)."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import rankless

model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 4))
average = copy.deepcopy(model).eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)
images, labels = torch.rand(52, 1, 8, 8), torch.randint(0, 4, (52,))


@rankless.job(model=model, optimizer=optimizer)
def train(images, labels):
    return F.cross_entropy(model(images), labels)


for _epoch in range(2):
    for batch in rankless.loader(torch.utils.data.TensorDataset(images, labels), batch_size=13, shuffle=True, seed=5):
        train(*batch)
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)
    with torch.no_grad():
        print(F.cross_entropy(average(images.to(torch.float32)), labels).item())

"""A data set with random augmentations in reader processes, and class weights with ignored labels."""

import torch
import torch.nn.functional as F
from torch import nn

import rankless


class Images(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.images = torch.rand(48, 1, 10, 10, generator=generator)

    def __len__(self):
        return 48

    def __getitem__(self, index):
        image = self.images[index]
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        return image + 0.05 * torch.randn(image.shape), -100 if index % 7 == 0 else index % 4


model = nn.Sequential(
    nn.Conv2d(1, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
)
head = nn.Linear(20, 4)
optimizer = torch.optim.NAdam([*model.parameters(), *head.parameters()], lr=4e-3)
weights = torch.tensor([1.0, 2.0, 0.5, 1.0])


@rankless.job(model={"body": model, "head": head}, optimizer=optimizer)
def train(images, labels):
    return F.cross_entropy(head(model(images)), labels, weight=weights.to(images.dtype), ignore_index=-100)


for _epoch in range(2):
    for batch in rankless.loader(Images(), batch_size=12, shuffle=True, num_workers=1):
        print(train(*batch).item())

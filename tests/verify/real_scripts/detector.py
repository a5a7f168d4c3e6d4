"""A one-stage detector: a box and a class for each cell of a grid, with a loss over the cells that hold an object."""

import torch
import torch.nn.functional as F
from torch import nn

import rankless

GRID, CLASSES, SIDE = 4, 3, 32


class Detector(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        layers = []
        for inputs, outputs in [(3, width), (width, 2 * width), (2 * width, 4 * width)]:
            layers += [
                nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.SiLU(),
            ]
        self.backbone, self.head = nn.Sequential(*layers), nn.Conv2d(4 * width, 5 + CLASSES, 1)

    def forward(self, images):
        return self.head(self.backbone(images)).permute(0, 2, 3, 1)


def giou_loss(boxes, wanted):
    """Return 1 - GIoU of boxes given as center, width and height."""
    low, high = boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2
    wanted_low, wanted_high = wanted[:, :2] - wanted[:, 2:] / 2, wanted[:, :2] + wanted[:, 2:] / 2
    shared = (torch.min(high, wanted_high) - torch.max(low, wanted_low)).clamp(min=0).prod(dim=1)
    union = (high - low).prod(dim=1) + (wanted_high - wanted_low).prod(dim=1) - shared
    hull = (torch.max(high, wanted_high) - torch.min(low, wanted_low)).prod(dim=1)
    return 1 - shared / union + (hull - union) / hull


def detection_loss(predicted, targets):
    mask = targets[..., 0] > 0
    found, wanted = predicted[mask], targets[mask]
    boxes = torch.cat([found[:, 1:3].sigmoid(), found[:, 3:5].exp().clamp(max=4)], dim=1)
    box_loss = giou_loss(boxes, wanted[:, 1:5]).mean()
    class_loss = F.cross_entropy(found[:, 5:], wanted[:, 5].long(), label_smoothing=0.05)
    empty_loss = F.binary_cross_entropy_with_logits(predicted[~mask][:, 0], targets[~mask][:, 0])
    object_loss = F.binary_cross_entropy_with_logits(found[:, 0], wanted[:, 0])
    return 2 * box_loss + class_loss + object_loss + 0.5 * empty_loss


def make_scene():
    """Return an image with one to three rectangles, and the target of each cell: is there one, its box, its class."""
    image, target = 0.2 * torch.randn(3, SIDE, SIDE), torch.zeros(GRID, GRID, 6)
    for _ in range(int(torch.randint(1, 4, (1,)))):
        row, column, kind = (int(torch.randint(0, limit, (1,))) for limit in (GRID, GRID, CLASSES))
        height, width = torch.randint(4, 9, (2,)).tolist()
        top, left = row * 8 + (8 - height) // 2, column * 8 + (8 - width) // 2
        image[kind, top : top + height, left : left + width] += 1
        box = [(left + width / 2) / 8 - column, (top + height / 2) / 8 - row, width / 8, height / 8]
        target[row, column] = torch.tensor([1.0, *box, float(kind)])
    return image, target


torch.manual_seed(0)
data = [make_scene() for _ in range(53)]
loader = rankless.loader(data, batch_size=16, shuffle=True)
model = Detector()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)


@rankless.job(model=model, optimizer=optimizer, capture=False)
def train(images, targets):
    return detection_loss(model(images), targets)


for epoch in range(2):
    for images, targets in loader:
        loss = train(images, targets)
    print(f"epoch {epoch + 1}: loss {loss.item():.4f}")

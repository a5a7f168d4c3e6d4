"""A U-Net with InstanceNorm that segments discs: skip connections, bilinear upsampling, cross-entropy and Dice."""

import torch
import torch.nn.functional as F
from torch import nn

import rankless


class DoubleConv(nn.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.InstanceNorm2d(outputs, affine=True),
            nn.LeakyReLU(0.01, inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.InstanceNorm2d(outputs, affine=True),
            nn.LeakyReLU(0.01, inplace=True),
        )


class UNet(nn.Module):
    def __init__(self, width=8, classes=3):
        super().__init__()
        self.enter, self.down = DoubleConv(1, width), DoubleConv(width, 2 * width)
        self.bottom = DoubleConv(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.merge2, self.merge1 = DoubleConv(4 * width, 2 * width), DoubleConv(3 * width, width)
        self.dropout, self.head = nn.Dropout2d(0.1), nn.Conv2d(width, classes, 1)

    def forward(self, x):
        first = self.enter(x)
        second = self.down(F.max_pool2d(first, 2))
        hidden = self.dropout(self.bottom(F.max_pool2d(second, 2)))
        hidden = self.merge2(torch.cat([self.up2(hidden), second], dim=1))
        hidden = F.interpolate(hidden, size=first.shape[2:], mode="bilinear", align_corners=False)
        return self.head(self.merge1(torch.cat([hidden, first], dim=1)))


def dice_loss(logits, masks, smooth=1.0):
    probabilities = logits.softmax(dim=1)
    wanted = F.one_hot(masks, logits.shape[1]).permute(0, 3, 1, 2).to(logits.dtype)
    shared = (probabilities * wanted).sum(dim=(0, 2, 3))
    total = probabilities.sum(dim=(0, 2, 3)) + wanted.sum(dim=(0, 2, 3))
    return 1 - ((2 * shared + smooth) / (total + smooth)).mean()


def make_discs(count, side=24):
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    masks = torch.zeros(count, side, side, dtype=torch.long)
    for kind in (1, 2):
        center = torch.randint(4, side - 4, (count, 2, 1, 1))
        near = (rows - center[:, 0]) ** 2 + (columns - center[:, 1]) ** 2 < (3 + 2 * kind)
        masks[near] = kind
    return 0.5 * masks[:, None] + 0.3 * torch.randn(count, 1, side, side), masks


torch.manual_seed(0)
images, masks = make_discs(47)
data, valid = torch.utils.data.TensorDataset(images[:37], masks[:37]), (images[37:], masks[37:])
loader = rankless.loader(data, batch_size=10, shuffle=True)
model = UNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.99, nesterov=True, weight_decay=3e-5)


@rankless.job(model=model, optimizer=optimizer, clip_norm=12)
def train(images, masks):
    logits = model(images)
    return F.cross_entropy(logits, masks) + dice_loss(logits, masks)


@rankless.job(model=model)
def evaluate(images, masks):
    logits = model(images)
    return dice_loss(logits, masks), (logits.argmax(dim=1) == masks).float().mean()


for epoch in range(2):
    model.train()
    for images, masks in loader:
        loss = train(images, masks)
    model.eval()
    dice, accuracy = evaluate(*valid)
    print(
        f"epoch {epoch + 1}: loss {loss.item():.4f}, valid Dice loss {dice.item():.4f}, accuracy {accuracy.item():.4f}"
    )

"""SimCLR: two random views of each image, made by the data set, and the NT-Xent loss over the whole batch."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset


class TwoViews(Dataset):
    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def view(self, image):
        top, left = torch.randint(0, 3, (2,)).tolist()
        image = F.pad(image, (1, 1, 1, 1))[:, top : top + 8, left : left + 8]
        return (image * (0.7 + 0.6 * torch.rand(1)) + 0.05 * torch.randn_like(image)).clamp(0, 1)

    def __getitem__(self, index):
        return self.view(self.images[index]), self.view(self.images[index])


class SimCLR(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.projector = nn.Sequential(nn.Linear(32, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, images):
        return F.normalize(self.projector(self.encoder(images)), dim=1)


def nt_xent(first, second, temperature=0.2):
    features = torch.cat([first, second], dim=0)
    similarity = features @ features.T / temperature
    count = features.shape[0]
    similarity = similarity.masked_fill(torch.eye(count, dtype=torch.bool), float("-inf"))
    targets = (torch.arange(count) + count // 2) % count
    return F.cross_entropy(similarity, targets)


torch.manual_seed(0)
images = torch.tensor(load_digits().images[:170], dtype=torch.float32)[:, None] / 16
loader = DataLoader(TwoViews(images), batch_size=48, shuffle=True)
model = SimCLR()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)


def train(first, second):
    loss = nt_xent(model(first), model(second))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


for epoch in range(2):
    for first, second in loader:
        loss = train(first, second)
        scheduler.step()
    print(f"epoch {epoch + 1}: loss {loss.item():.4f}, lr {scheduler.get_last_lr()[0]:.6f}")

"""A diffusion model on digits: a U-Net with time embeddings and attention, random times, averaged weights."""

import math

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

TIMES = 100


class Block(nn.Module):
    def __init__(self, inputs, outputs, time=32):
        super().__init__()
        self.first, self.second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(4, outputs), nn.GroupNorm(4, outputs)
        self.time = nn.Linear(time, 2 * outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x, time):
        scale, shift = self.time(F.silu(time))[:, :, None, None].chunk(2, dim=1)
        hidden = F.silu(self.norm1(self.first(x)) * (scale + 1) + shift)
        return F.silu(self.norm2(self.second(hidden))) + self.skip(x)


class Attention(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(1, width)
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1, bias=False), nn.Conv2d(width, width, 1)

    def forward(self, x):
        n, c, h, w = x.shape
        q, k, v = (
            part.reshape(n, self.heads, c // self.heads, h * w) for part in self.qkv(self.norm(x)).chunk(3, dim=1)
        )
        weights = torch.einsum("bhdi,bhdj->bhij", q * (c // self.heads) ** -0.5, k).softmax(dim=-1)
        mixed = torch.einsum("bhij,bhdj->bhid", weights, v)
        return self.out(mixed.permute(0, 1, 3, 2).reshape(n, h, w, c).permute(0, 3, 1, 2)) + x


class UNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.enter, self.leave = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 1, 1)
        self.down1, self.down2 = Block(width, width), Block(width, 2 * width)
        self.middle, self.attention = Block(2 * width, 2 * width), Attention(2 * width)
        self.up2, self.up1 = Block(4 * width, width), Block(2 * width, width)

    def forward(self, x, times):
        frequencies = torch.exp(torch.arange(8) * -(math.log(1000) / 7))
        angles = times[:, None].float() * frequencies[None, :]
        time = self.embed(torch.cat([angles.sin(), angles.cos()], dim=-1))
        first = self.down1(self.enter(x), time)
        second = self.down2(F.avg_pool2d(first, 2), time)
        hidden = self.attention(self.middle(second, time))
        hidden = self.up2(torch.cat([hidden, second], dim=1), time)
        hidden = F.interpolate(hidden, scale_factor=2, mode="nearest")
        return self.leave(self.up1(torch.cat([hidden, first], dim=1), time))


torch.manual_seed(0)
images = torch.tensor(load_digits().images[:117], dtype=torch.float32)[:, None] / 8 - 1
data = torch.utils.data.TensorDataset(images)
loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
betas = torch.linspace(1e-4, 0.05, TIMES)
alphas_cumprod = torch.cumprod(1 - betas, dim=0)
model = UNet()
average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)


def train(images):
    times = torch.randint(0, TIMES, (images.shape[0],))
    noise = torch.randn_like(images)
    kept = alphas_cumprod[times][:, None, None, None]
    noisy = kept.sqrt() * images + (1 - kept).sqrt() * noise
    loss = F.mse_loss(model(noisy, times), noise)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


@torch.no_grad()
def denoise(images, times):
    kept, beta = alphas_cumprod[times][:, None, None, None], betas[times][:, None, None, None]
    mean = (images - beta / (1 - kept).sqrt() * average(images, times)) / (1 - beta).sqrt()
    return mean + beta.sqrt() * torch.randn_like(images) * (times > 0)[:, None, None, None]


for epoch in range(2):
    for (images,) in loader:
        loss = train(images)
        average.update_parameters(model)
    print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
samples = torch.randn(5, 1, 8, 8)
for time in reversed(range(0, TIMES, 25)):
    samples = denoise(samples, torch.full((5,), time))
print(f"samples: mean {samples.mean().item():.4f}, deviation {samples.std().item():.4f}")

"""WGAN: a critic whose weights are clipped before each of its steps, RMSprop, two critic steps per generator step."""

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(0)
images = torch.tensor(load_digits().images[:210], dtype=torch.float32)[:, None] / 8 - 1
data = torch.utils.data.TensorDataset(images)
loader = torch.utils.data.DataLoader(data, batch_size=50, shuffle=True)
generator = nn.Sequential(
    nn.Linear(16, 32 * 4),
    nn.Unflatten(1, (32, 2, 2)),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.ConvTranspose2d(32, 16, 4, 2, 1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.ConvTranspose2d(16, 1, 4, 2, 1),
    nn.Tanh(),
)
critic = nn.Sequential(
    nn.Conv2d(1, 16, 4, 2, 1),
    nn.LeakyReLU(0.2),
    nn.Conv2d(16, 32, 4, 2, 1),
    nn.LeakyReLU(0.2),
    nn.Flatten(),
    nn.Linear(128, 1),
)
optimizer_g = torch.optim.RMSprop(generator.parameters(), lr=5e-5)
optimizer_c = torch.optim.RMSprop(critic.parameters(), lr=5e-5)


def train_critic(real):
    for parameter in critic.parameters():
        parameter.data.clamp_(-0.05, 0.05)
    noise = torch.randn(real.shape[0], 16)
    fake = generator(noise).detach()
    loss = critic(fake).mean() - critic(real).mean()
    optimizer_c.zero_grad()
    loss.backward()
    optimizer_c.step()
    return loss


def train_generator(noise):
    loss = -critic(generator(noise)).mean()
    optimizer_g.zero_grad()
    loss.backward()
    optimizer_g.step()
    return loss


for epoch in range(2):
    for number, (real,) in enumerate(loader):
        loss_c = train_critic(real)
        if number % 2 == 1:
            loss_g = train_generator(torch.randn(50, 16))
    print(f"epoch {epoch + 1}: critic {loss_c.item():.6f}, generator {loss_g.item():.6f}")

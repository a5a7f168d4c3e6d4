"""WGAN-GP: the gradient penalty of the critic at points between real and generated images, by double backward."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import rankless

torch.manual_seed(0)
images = torch.tensor(load_digits().images[:210], dtype=torch.float32)[:, None] / 8 - 1
data = torch.utils.data.TensorDataset(images)
loader = rankless.loader(data, batch_size=50, shuffle=True)
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
    nn.LayerNorm([16, 4, 4]),
    nn.LeakyReLU(0.2),
    nn.Conv2d(16, 32, 4, 2, 1),
    nn.LeakyReLU(0.2),
    nn.Flatten(),
    nn.Linear(128, 1),
)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-4, betas=(0.0, 0.9))
optimizer_c = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))


def gradient_penalty(real, fake):
    alpha = torch.rand(real.size(0), 1, 1, 1)
    between = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    scores = critic(between)
    gradients = torch.autograd.grad(
        outputs=scores, inputs=between, grad_outputs=torch.ones_like(scores), create_graph=True, retain_graph=True
    )[0]
    gradients = gradients.view(gradients.size(0), -1)
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


@rankless.job(model=[critic, generator], optimizer=optimizer_c)
def train_critic(real):
    with torch.no_grad():
        fake = generator(torch.randn(real.size(0), 16))
    penalty = gradient_penalty(real, fake)
    loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
    return {"loss": loss, "penalty": penalty}


@rankless.job(model=[generator, critic], optimizer=optimizer_g)
def train_generator(noise):
    return -critic(generator(noise)).mean()


for epoch in range(2):
    for number, (real,) in enumerate(loader):
        result = train_critic(real)
        if number % 2 == 1:
            loss_g = train_generator(torch.randn(50, 16))
    print(
        f"epoch {epoch + 1}: critic {result['loss'].item():.5f}, penalty {result['penalty'].item():.5f},"
        f" generator {loss_g.item():.6f}"
    )

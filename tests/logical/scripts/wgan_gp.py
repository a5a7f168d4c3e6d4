import numpy as np
import torch
import torch.autograd as autograd
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

np.random.seed(0)
torch.manual_seed(0)

n_critic, lambda_gp, latent_dim = 3, 10, 4
angles = np.random.rand(230) * 2 * np.pi
points = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype("float32")
points += 0.05 * np.random.randn(*points.shape).astype("float32")
dataloader = DataLoader(TensorDataset(torch.from_numpy(points)), batch_size=50, shuffle=True)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()

        def block(in_feat, out_feat, normalize=True):
            layers = [nn.Linear(in_feat, out_feat)]
            if normalize:
                layers.append(nn.BatchNorm1d(out_feat, 0.8))
            layers.append(nn.LeakyReLU(0.2, inplace=True))
            return layers

        self.model = nn.Sequential(*block(latent_dim, 16, normalize=False), *block(16, 16), nn.Linear(16, 2))

    def forward(self, z):
        return self.model(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1, bias=False)
        )

    def forward(self, x):
        return self.model(x.view(x.shape[0], -1))


def compute_gradient_penalty(D, real_samples, fake_samples):
    """Calculates the gradient penalty loss for WGAN GP"""
    alpha = torch.tensor(np.random.random((real_samples.size(0), 1)), dtype=real_samples.dtype)
    interpolates = (alpha * real_samples + ((1 - alpha) * fake_samples)).requires_grad_(True)
    d_interpolates = D(interpolates)
    fake = torch.ones(real_samples.shape[0], 1)
    gradients = autograd.grad(
        outputs=d_interpolates,
        inputs=interpolates,
        grad_outputs=fake,
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    gradients = gradients.view(gradients.size(0), -1)
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


generator, discriminator = Generator(), Discriminator()
optimizer_G = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.9))

batches_done = 0
for epoch in range(3):
    for i, (real,) in enumerate(dataloader):
        optimizer_D.zero_grad()
        z = torch.tensor(np.random.normal(0, 1, (real.shape[0], latent_dim)), dtype=torch.float32)
        fake = generator(z)
        penalty = compute_gradient_penalty(discriminator, real.data, fake.data)
        d_loss = -torch.mean(discriminator(real)) + torch.mean(discriminator(fake)) + lambda_gp * penalty
        d_loss.backward()
        optimizer_D.step()
        optimizer_G.zero_grad()
        if i % n_critic == 0:
            g_loss = -torch.mean(discriminator(generator(z)))
            g_loss.backward()
            optimizer_G.step()
            print(
                f"[Epoch {epoch}] [Batch {i}/{len(dataloader)}] "
                f"[D loss: {d_loss.item():.10f}] [G loss: {g_loss.item():.10f}] [GP: {penalty.item():.10f}]"
            )
            batches_done += n_critic

generator.eval()
with torch.inference_mode():
    print(generator(torch.ones(2, latent_dim)).tolist())
print("D checksum %.12f" % sum(p.detach().double().sum() for p in discriminator.parameters()))

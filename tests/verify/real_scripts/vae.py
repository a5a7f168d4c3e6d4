"""A convolutional VAE on digits, written with torch.distributions: rsample, log_prob and kl_divergence."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributions import Bernoulli, Independent, Normal, kl_divergence

import rankless


class VAE(nn.Module):
    def __init__(self, latent=8):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.mean, self.log_variance = nn.Linear(128, latent), nn.Linear(128, latent)
        self.decoder = nn.Sequential(
            nn.Linear(latent, 128),
            nn.ReLU(),
            nn.Unflatten(1, (32, 2, 2)),
            nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1),
        )

    def encode(self, images):
        hidden = self.encoder(images)
        return Independent(Normal(self.mean(hidden), (0.5 * self.log_variance(hidden)).exp()), 1)

    def decode(self, latent):
        return Independent(Bernoulli(logits=self.decoder(latent)), 3)


torch.manual_seed(0)
images = (torch.tensor(load_digits().images[:330], dtype=torch.float32)[:, None] > 8).float()
train_set, test_set = torch.utils.data.TensorDataset(images[:231]), torch.utils.data.TensorDataset(images[231:])
loader = rankless.loader(train_set, batch_size=64, shuffle=True)
test_loader = rankless.loader(test_set, batch_size=64)
model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)


@rankless.job(model=model, optimizer=optimizer)
def train(images):
    posterior = model.encode(images)
    prior = Independent(Normal(torch.zeros_like(posterior.mean), torch.ones_like(posterior.mean)), 1)
    log_likelihood = model.decode(posterior.rsample()).log_prob(images)
    divergence = kl_divergence(posterior, prior)
    loss = (divergence - log_likelihood).mean()
    return {"loss": loss, "kl": divergence.mean()}


@rankless.job(model=model)
def evaluate(images):
    posterior = model.encode(images)
    reconstruction = model.decode(posterior.mean)
    return (reconstruction.mean - images).square().sum(), reconstruction.log_prob(images).sum()


for epoch in range(2):
    model.train()
    for (images,) in loader:
        result = train(images)
    model.eval()
    error, likelihood = 0.0, 0.0
    for (images,) in test_loader:
        squared, log_prob = evaluate(images)
        error += squared.item()
        likelihood += log_prob.item()
    print(
        f"epoch {epoch + 1}: loss {result['loss'].item():.4f}, kl {result['kl'].item():.4f},"
        f" test error {error / len(test_set):.4f}, log likelihood {likelihood / len(test_set):.4f}"
    )

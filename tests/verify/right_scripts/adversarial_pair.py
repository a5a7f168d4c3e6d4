"""A generator and a discriminator with an optimizer each, and noise drawn by the script outside jobs."""

import torch
import torch.nn.functional as F
from torch import nn

import rankless

generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.LeakyReLU(0.2), nn.Linear(16, 6))
discriminator = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(16, 1))
for_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
for_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
real = torch.randn(64, 6) * 0.5 + 1


@rankless.job(model=[discriminator, generator], optimizer=for_discriminator)
def train_discriminator(real, noise):
    with torch.no_grad():
        fake = generator(noise)
    right, wrong = discriminator(real), discriminator(fake)
    ones, zeros = torch.ones_like(right), torch.zeros_like(wrong)
    return F.binary_cross_entropy_with_logits(right, ones) + F.binary_cross_entropy_with_logits(wrong, zeros)


@rankless.job(model=[generator, discriminator], optimizer=for_generator)
def train_generator(noise):
    wrong = discriminator(generator(noise))
    return F.binary_cross_entropy_with_logits(wrong, torch.ones_like(wrong))


for _epoch in range(2):
    for (batch,) in rankless.loader(torch.utils.data.TensorDataset(real), batch_size=16, shuffle=True):
        noise = torch.randn(len(batch), 4)
        print(train_discriminator(batch, noise).item(), train_generator(noise).item())

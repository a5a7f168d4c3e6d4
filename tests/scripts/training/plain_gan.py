"""DCGAN on the handwritten digits, upsampled to 16 x 16."""

import argparse
import os

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--n_epochs", type=int, default=20, help="number of epochs of training")
parser.add_argument("--batch_size", type=int, default=64, help="size of the batches")
parser.add_argument("--lr", type=float, default=0.0002, help="adam: learning rate")
parser.add_argument("--b1", type=float, default=0.5, help="adam: decay of first order momentum of gradient")
parser.add_argument("--latent_dim", type=int, default=32, help="dimensionality of the latent space")
parser.add_argument("--channels", type=int, default=32)
parser.add_argument("--limit", type=int, default=0, help="images to train on (0: all)")
parser.add_argument("--sample_dir", default="samples")
opt = parser.parse_args()
print(opt)

torch.manual_seed(1)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
os.makedirs(opt.sample_dir, exist_ok=True)


def weights_init_normal(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        torch.nn.init.normal_(m.weight.data, 0.0, 0.02)
    elif classname.find("BatchNorm2d") != -1:
        torch.nn.init.normal_(m.weight.data, 1.0, 0.02)
        torch.nn.init.constant_(m.bias.data, 0.0)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        c = opt.channels
        self.l1 = nn.Linear(opt.latent_dim, 2 * c * 4 * 4)
        self.main = nn.Sequential(
            nn.BatchNorm2d(2 * c),
            nn.ConvTranspose2d(2 * c, c, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(c, 0.8),
            nn.ReLU(True),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(c, c // 2, 3, padding=1),
            nn.BatchNorm2d(c // 2, 0.8),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(c // 2, 1, 3, stride=1, padding=1),
            nn.Tanh(),
        )

    def forward(self, z):
        out = self.l1(z)
        out = out.view(out.shape[0], -1, 4, 4)
        return self.main(out)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()

        def block(in_filters, out_filters, bn=True):
            layers = [
                nn.Conv2d(in_filters, out_filters, 3, 2, 1),
                nn.LeakyReLU(0.2, inplace=True),
                nn.Dropout2d(0.25),
            ]
            if bn:
                layers.append(nn.BatchNorm2d(out_filters, 0.8))
            return layers

        self.model = nn.Sequential(*block(1, 16, bn=False), *block(16, 32), *block(32, 64))
        self.adv_layer = nn.Linear(64 * 2 * 2, 1)

    def forward(self, img):
        out = self.model(img)
        return self.adv_layer(out.view(out.shape[0], -1))


def load_images():
    images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    if opt.limit:
        images = images[: opt.limit]
    return F.interpolate(images, size=16, mode="bilinear", align_corners=False)


dataloader = DataLoader(TensorDataset(load_images()), batch_size=opt.batch_size, shuffle=True)

adversarial_loss = nn.BCEWithLogitsLoss()
generator = Generator().to(device)
discriminator = Discriminator().to(device)
generator.apply(weights_init_normal)
discriminator.apply(weights_init_normal)
optimizer_G = torch.optim.Adam(generator.parameters(), lr=opt.lr, betas=(opt.b1, 0.999))
optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=opt.lr, betas=(opt.b1, 0.999))
fixed_noise = torch.randn(16, opt.latent_dim, device=device)


def train_generator(z):
    optimizer_G.zero_grad()
    gen_imgs = generator(z)
    validity = discriminator(gen_imgs)
    g_loss = adversarial_loss(validity, torch.ones_like(validity))
    g_loss.backward()
    optimizer_G.step()
    return g_loss, gen_imgs


def train_discriminator(real_imgs, gen_imgs):
    optimizer_D.zero_grad()
    real, fake = discriminator(real_imgs), discriminator(gen_imgs)
    # One-sided label smoothing, with some noise.
    smooth = torch.empty_like(real).uniform_(0.8, 1.0)
    d_loss = (adversarial_loss(real, smooth) + adversarial_loss(fake, torch.zeros_like(fake))) / 2
    d_loss.backward()
    optimizer_D.step()
    return d_loss, (torch.sigmoid(real).mean(), torch.sigmoid(fake).mean())


for epoch in range(opt.n_epochs):
    for i, (imgs,) in enumerate(dataloader):
        real_imgs = imgs.to(device)
        z = torch.randn(imgs.size(0), opt.latent_dim, device=device)
        g_loss, gen_imgs = train_generator(z)
        d_loss, (d_real, d_fake) = train_discriminator(real_imgs, gen_imgs.detach())
        if i % 10 == 0:
            print(
                f"[Epoch {epoch}/{opt.n_epochs}] [Batch {i}/{len(dataloader)}] [D loss: {d_loss.item():.6f}] "
                f"[G loss: {g_loss.item():.6f}] [D(x): {d_real:.4f}] [D(G(z)): {d_fake:.4f}]"
            )
    generator.eval()
    with torch.no_grad():
        samples = generator(fixed_noise).cpu()
    generator.train()
    np.save(os.path.join(opt.sample_dir, f"{epoch:03d}.npy"), samples.numpy())
    print(f"samples: mean {samples.mean():.6f} std {samples.std():.6f}")
torch.save(generator.state_dict(), os.path.join(opt.sample_dir, "generator.pt"))

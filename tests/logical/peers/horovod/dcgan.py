from __future__ import print_function

import argparse
import random

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.optim as optim
import torch.utils.data
from sklearn.datasets import load_digits
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batchSize", type=int, default=60, help="input batch size")
parser.add_argument("--nz", type=int, default=12, help="size of the latent z vector")
parser.add_argument("--ngf", type=int, default=8)
parser.add_argument("--ndf", type=int, default=8)
parser.add_argument("--niter", type=int, default=2, help="number of epochs to train for")
parser.add_argument("--lr", type=float, default=0.0002)
parser.add_argument("--beta1", type=float, default=0.5)
parser.add_argument("--manualSeed", type=int, default=999)
opt = parser.parse_args()
hvd.init()
if hvd.rank() == 0:
    print("Random Seed: ", opt.manualSeed)
random.seed(opt.manualSeed)
torch.manual_seed(opt.manualSeed)

X, y = load_digits(return_X_y=True)
real = torch.tensor(X[:250], dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
dataset = torch.utils.data.TensorDataset(real, torch.tensor(y[:250]))
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
dataloader = torch.utils.data.DataLoader(dataset, batch_size=opt.batchSize, sampler=sampler)
device = torch.device("cpu")
nz, ngf, ndf = int(opt.nz), int(opt.ngf), int(opt.ndf)


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        torch.nn.init.normal_(m.weight, 0.0, 0.02)
    elif classname.find("BatchNorm") != -1:
        torch.nn.init.normal_(m.weight, 1.0, 0.02)
        torch.nn.init.zeros_(m.bias)


netG = nn.Sequential(
    nn.ConvTranspose2d(nz, ngf * 2, 4, 1, 0, bias=False),
    nn.BatchNorm2d(ngf * 2),
    nn.ReLU(True),
    nn.ConvTranspose2d(ngf * 2, 1, 4, 2, 1, bias=False),
    nn.Tanh(),
).to(device)
netG.apply(weights_init)
netD = nn.Sequential(
    nn.Conv2d(1, ndf, 4, 2, 1, bias=False),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(ndf, ndf * 2, 3, 1, 1, bias=False),
    nn.BatchNorm2d(ndf * 2),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(ndf * 2, 1, 4, 1, 0, bias=False),
    nn.Sigmoid(),
).to(device)
netD.apply(weights_init)
if hvd.rank() == 0:
    print(netG)

criterion = nn.BCELoss()
fixed_noise = torch.randn(opt.batchSize, nz, 1, 1, device=device)
real_label, fake_label = 1, 0
optimizerD = optim.Adam(netD.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
for net, optimizer in ((netD, optimizerD), (netG, optimizerG)):
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizerD = hvd.DistributedOptimizer(optimizerD, named_parameters=netD.named_parameters(), backward_passes_per_step=2)
optimizerG = hvd.DistributedOptimizer(optimizerG, named_parameters=netG.named_parameters())

for epoch in range(opt.niter):
    sampler.set_epoch(epoch)
    for i, data in enumerate(dataloader, 0):
        # (1) Update D network: maximize log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
        real_cpu = data[0].to(device)
        batch_size = real_cpu.size(0)
        label = torch.full((batch_size,), real_label, dtype=real_cpu.dtype, device=device)
        output = netD(real_cpu).view(-1, 1).squeeze(1)
        errD_real = criterion(output, label)
        errD_real.backward()
        D_x = output.mean().item()

        # train with fake
        noise = torch.randn(batch_size, nz, 1, 1, device=device)
        fake = netG(noise)
        label.fill_(fake_label)
        output = netD(fake.detach()).view(-1, 1).squeeze(1)
        errD_fake = criterion(output, label)
        errD_fake.backward()
        D_G_z1 = output.mean().item()
        errD = errD_real + errD_fake
        optimizerD.step()

        # (2) Update G network: maximize log(D(G(z)))
        netD.requires_grad_(False)
        netG.zero_grad()
        label.fill_(real_label)  # fake labels are real for generator cost
        output = netD(fake).view(-1, 1).squeeze(1)
        errG = criterion(output, label)
        errG.backward()
        netD.requires_grad_(True)
        D_G_z2 = output.mean().item()
        optimizerG.step()

        if hvd.rank() == 0:
            print(
                "[%d/%d][%d/%d] Loss_D: %.12f Loss_G: %.12f D(x): %.12f D(G(z)): %.12f / %.12f"
                % (epoch, opt.niter, i, len(dataloader), errD.item(), errG.item(), D_x, D_G_z1, D_G_z2)
            )
    if hvd.rank() == 0:
        torch.save(netG.state_dict(), "netG_epoch_%d.pth" % epoch)
        torch.save(netD.state_dict(), "netD_epoch_%d.pth" % epoch)
if hvd.rank() == 0:
    torch.save(netG(fixed_noise).detach(), "fake_samples.pt")

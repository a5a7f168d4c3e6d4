import torch
import torch.distributed as dist
import torch.utils.data
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

torch.manual_seed(1)
device = torch.device("cpu")
dist.init_process_group()
digits = torch.tensor(load_digits().data / 16.0, dtype=torch.float)
train_sampler = DistributedSampler(digits[:900])
train_loader = torch.utils.data.DataLoader(digits[:900], batch_size=128, sampler=train_sampler)
test_sampler = DistributedSampler(digits[900:1200], shuffle=False)
test_loader = torch.utils.data.DataLoader(digits[900:1200], batch_size=128, sampler=test_sampler)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 40)
        self.fc21 = nn.Linear(40, 6)
        self.fc22 = nn.Linear(40, 6)
        self.fc3 = nn.Linear(6, 40)
        self.fc4 = nn.Linear(40, 64)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        h3 = F.relu(self.fc3(z))
        return torch.sigmoid(self.fc4(h3))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 64))
        z = self.reparameterize(mu, logvar)
        return self.decode(z), mu, logvar


model = DistributedDataParallel(VAE().to(device))
optimizer = optim.Adam(model.parameters(), lr=1e-3)


# Reconstruction + KL divergence losses summed over all elements and batch
def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + KLD


def sum_over_ranks(value):
    total = torch.tensor(value, device=device)
    dist.all_reduce(total)
    return total.item()


def train(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    train_loss = 0
    for batch_idx, data in enumerate(train_loader):
        data = data.to(device)
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
        if batch_idx % 4 == 0 and dist.get_rank() == 0:
            print(
                f"Train Epoch: {epoch} [{batch_idx * len(data)}/{len(train_loader.dataset)}]"
                f"\tLoss: {loss.item() / len(data):.12f}"
            )
    train_loss = sum_over_ranks(train_loss)
    if dist.get_rank() == 0:
        print(f"====> Epoch: {epoch} Average loss: {train_loss / len(train_loader.dataset):.12f}")


def test(epoch):
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for i, data in enumerate(test_loader):
            data = data.to(device)
            recon_batch, mu, logvar = model(data)
            test_loss += loss_function(recon_batch, data, mu, logvar).item()
            if i == 0 and dist.get_rank() == 0:
                n = min(data.size(0), 8)
                comparison = torch.cat([data.view(-1, 1, 8, 8)[:n], recon_batch.view(-1, 1, 8, 8)[:n]])
                torch.save(comparison.cpu(), f"reconstruction_{epoch}.pt")
    test_loss = sum_over_ranks(test_loss)
    test_loss /= len(test_loader.dataset)
    if dist.get_rank() == 0:
        print(f"====> Test set loss: {test_loss:.12f}")


if __name__ == "__main__":
    for epoch in range(1, 4):
        train(epoch)
        test(epoch)
        with torch.no_grad():
            sample = torch.randn(16, 6).to(device)
            sample = model.module.decode(sample).cpu()
            if dist.get_rank() == 0:
                torch.save(sample.view(16, 1, 8, 8), f"sample_{epoch}.pt")
    dist.destroy_process_group()

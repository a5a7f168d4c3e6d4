import torch
import torch.nn as nn
from sklearn.datasets import load_iris
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(7)
X, Y = load_iris(return_X_y=True)
X = torch.tensor(X, dtype=torch.float32)
X = (X - X.mean(0)) / X.std(0)
loader = DataLoader(TensorDataset(X, torch.tensor(Y)), batch_size=40, shuffle=True, drop_last=True)
num_classes, noise_dim = 3, 5


class CondGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.label_emb = nn.Embedding(num_classes, num_classes)
        self.net = nn.Sequential(
            nn.Linear(noise_dim + num_classes, 24), nn.LayerNorm(24), nn.LeakyReLU(0.2), nn.Linear(24, 4)
        )

    def forward(self, noise, labels):
        return self.net(torch.cat((self.label_emb(labels), noise), -1))


class CondDiscriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.label_embedding = nn.Embedding(num_classes, num_classes)
        self.net = nn.Sequential(nn.Linear(4 + num_classes, 24), nn.LeakyReLU(0.2), nn.Dropout(0.4), nn.Linear(24, 1))

    def forward(self, x, labels):
        return self.net(torch.cat((x, self.label_embedding(labels)), -1))


G, D = CondGenerator(), CondDiscriminator()
adversarial_loss = nn.MSELoss()
opt_g = torch.optim.Adam(G.parameters(), lr=1e-3)
opt_d = torch.optim.RMSprop(D.parameters(), lr=1e-3)
history = []
for epoch in range(4):
    d_total, g_total = 0.0, 0.0
    for real, labels in loader:
        n = real.size(0)
        valid, fake = torch.ones(n, 1), torch.zeros(n, 1)
        # generator
        opt_g.zero_grad()
        z = torch.randn(n, noise_dim)
        gen_labels = torch.randint(0, num_classes, (n,))
        gen = G(z, gen_labels)
        g_loss = adversarial_loss(D(gen, gen_labels), valid)
        g_loss.backward()
        opt_g.step()
        # discriminator
        opt_d.zero_grad()
        d_real = adversarial_loss(D(real, labels), valid)
        d_fake = adversarial_loss(D(gen.detach(), gen_labels), fake)
        d_loss = (d_real + d_fake) / 2
        d_loss.backward()
        opt_d.step()
        d_total += d_loss.item()
        g_total += g_loss.item()
    history.append((d_total / len(loader), g_total / len(loader)))
    print("epoch", epoch, *history[-1])

G.eval()
with torch.no_grad():
    for c in range(num_classes):
        samples = G(torch.randn(50, noise_dim), torch.full((50,), c))
        print("class", c, "mean", [round(v, 10) for v in samples.mean(0).tolist()])

"""A denoising autoencoder; hooks collect activations and gradients."""

import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader

torch.manual_seed(33)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8), nn.ReLU())
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())

    def forward(self, x):
        return self.decoder(self.encoder(x))


activations, gradients = {}, {}


def save_activation(name):
    def hook(module, inputs, output):
        activations[name] = output.detach()

    return hook


def save_gradient(name):
    def hook(module, grad_input, grad_output):
        gradients[name] = grad_output[0].norm().item()

    return hook


model = Autoencoder()
handles = [model.encoder[2].register_forward_hook(save_activation("latent"))]
handles.append(model.decoder[0].register_full_backward_hook(save_gradient("decoder.0")))
model.encoder[0].weight.register_hook(lambda grad: grad.clamp(-0.001, 0.001))
model.decoder.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.9,))

loader = DataLoader(torch.tensor(load_digits().data[:330] / 16, dtype=torch.float32), batch_size=50, shuffle=True)
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(3):
    total, active = 0.0, torch.zeros(8)
    for clean in loader:
        noisy = (clean + 0.2 * torch.randn(clean.shape)).clamp(0.0, 1.0)
        optimizer.zero_grad()
        loss = criterion(model(noisy), clean)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(clean)
        active += (activations["latent"] > 0).float().sum(dim=0)
    print(f"epoch {epoch} loss {total / len(loader.dataset):.12f} grad {gradients['decoder.0']:.12f}")
    print("  active latents", (active / len(loader.dataset)).tolist())
for handle in handles:
    handle.remove()

with torch.no_grad():
    codes = torch.cat([model.encoder(x) for x in loader])
print("codes", tuple(codes.shape), "mean", codes.mean().item(), "std", codes.std(dim=0).tolist())
torch.save(codes.mean(dim=0), "codes.pt")

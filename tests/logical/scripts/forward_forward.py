"""The forward-forward algorithm: each layer has a loss and an optimizer of its own."""

import argparse

import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset


def get_y_neg(y):
    y_neg = y.clone()
    for idx, y_samp in enumerate(y):
        allowed_indices = list(range(10))
        allowed_indices.remove(y_samp.item())
        y_neg[idx] = torch.tensor(allowed_indices)[torch.randint(len(allowed_indices), size=(1,))].item()
    return y_neg


def overlay_y_on_x(x, y, classes=10):
    x_ = x.clone()
    x_[:, :classes] *= 0.0
    x_[range(x.shape[0]), y] = x.max()
    return x_


class Layer(nn.Linear):
    def __init__(self, in_features, out_features, args):
        super().__init__(in_features, out_features)
        self.relu = torch.nn.ReLU()
        self.opt = Adam(self.parameters(), lr=args.lr)
        self.threshold, self.num_epochs = args.threshold, args.epochs

    def forward(self, x):
        x_direction = x / (x.norm(2, 1, keepdim=True) + 1e-4)
        return self.relu(torch.mm(x_direction, self.weight.T) + self.bias.unsqueeze(0))

    def train_layer(self, x_pos, x_neg):
        for i in range(self.num_epochs):
            g_pos = self.forward(x_pos).pow(2).mean(1)
            g_neg = self.forward(x_neg).pow(2).mean(1)
            loss = torch.log(1 + torch.exp(torch.cat([-g_pos + self.threshold, g_neg - self.threshold]))).mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            if i % 5 == 0:
                print("  step", i, "loss", loss.item())
        return self.forward(x_pos).detach(), self.forward(x_neg).detach()


class Net(torch.nn.Module):
    def __init__(self, dims, args):
        super().__init__()
        self.layers = [Layer(dims[d], dims[d + 1], args) for d in range(len(dims) - 1)]

    def predict(self, x):
        goodness_per_label = []
        for label in range(10):
            h = overlay_y_on_x(x, torch.full((len(x),), label))
            goodness = []
            for layer in self.layers:
                h = layer(h)
                goodness = goodness + [h.pow(2).mean(1)]
            goodness_per_label += [sum(goodness).unsqueeze(1)]
        return torch.cat(goodness_per_label, 1).argmax(1)

    def train_net(self, x_pos, x_neg):
        h_pos, h_neg = x_pos, x_neg
        for i, layer in enumerate(self.layers):
            print("training layer: ", i)
            h_pos, h_neg = layer.train_layer(h_pos, h_neg)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=11)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--threshold", type=float, default=2)
    args = parser.parse_args()
    torch.manual_seed(1234)
    X, Y = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(X / 16, dtype=torch.float32), torch.tensor(Y))
    train_loader = DataLoader(torch.utils.data.Subset(dataset, range(150)), batch_size=150, shuffle=True)
    test_loader = DataLoader(torch.utils.data.Subset(dataset, range(150, 200)), batch_size=50)
    net = Net([64, 32, 24], args)
    x, y = next(iter(train_loader))
    net.train_net(overlay_y_on_x(x, y), overlay_y_on_x(x, get_y_neg(y)))
    print("train error:", 1.0 - net.predict(x).eq(y).float().mean().item())
    x_te, y_te = next(iter(test_loader))
    print("test error:", 1.0 - net.predict(x_te).eq(y_te).float().mean().item())
    print("checksum:", [layer.weight.sum().item() for layer in net.layers])

from __future__ import print_function

import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset


class TripletDigits(Dataset):
    def __init__(self, train):
        digits = load_digits()
        part = slice(0, 300) if train else slice(300, 420)
        self.data = torch.from_numpy(digits.images[part]).float().unsqueeze(1).div(16.0)
        self.targets = digits.target[part]
        self.group_examples()

    def group_examples(self):
        self.grouped = {i: np.where(self.targets == i)[0] for i in range(10)}

    def __len__(self):
        return self.data.shape[0]

    def __getitem__(self, index):
        label = int(self.targets[index])
        positive = random.choice(list(self.grouped[label]))
        other = random.choice([k for k in range(10) if k != label])
        negative = random.choice(list(self.grouped[other]))
        return self.data[index], self.data[positive], self.data[negative]


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.AvgPool2d(4),
        )
        self.head = nn.Linear(16, 8)

    def forward_once(self, x):
        output = self.features(x)
        output = output.view(output.size()[0], -1)
        return F.normalize(self.head(output), p=2, dim=1)

    def forward(self, a, p, n):
        return self.forward_once(a), self.forward_once(p), self.forward_once(n)


def main():
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    train_loader = DataLoader(TripletDigits(True), batch_size=64, shuffle=True)
    test_loader = DataLoader(TripletDigits(False), batch_size=50)
    model = SiameseNetwork()
    criterion = nn.TripletMarginLoss(margin=0.5)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    for epoch in range(1, 3):
        model.train()
        for batch_idx, (anchor, positive, negative) in enumerate(train_loader):
            optimizer.zero_grad()
            loss = criterion(*model(anchor, positive, negative))
            loss.backward()
            optimizer.step()
            if batch_idx % 2 == 0:
                print(
                    "Train Epoch: {} [{}/{}]\tLoss: {:.12f}".format(
                        epoch, batch_idx * len(anchor), len(train_loader.dataset), loss.item()
                    )
                )
        model.eval()
        correct, distance = 0, 0.0
        with torch.no_grad():
            for anchor, positive, negative in test_loader:
                a, p, n = model(anchor, positive, negative)
                d_pos, d_neg = F.pairwise_distance(a, p), F.pairwise_distance(a, n)
                correct += (d_pos < d_neg).sum().item()
                distance += d_pos.sum().item()
        print(
            "Test: {}/{} triplets in order, mean distance {:.12f}".format(
                correct, len(test_loader.dataset), distance / len(test_loader.dataset)
            )
        )
    torch.save(model.state_dict(), "siamese_network.pt")


if __name__ == "__main__":
    main()

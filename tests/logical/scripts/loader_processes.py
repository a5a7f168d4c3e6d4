import random

import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset


def seed_worker(worker_id):
    worker_seed = torch.initial_seed() % 2**32
    np.random.seed(worker_seed)
    random.seed(worker_seed)


class AugmentedDigits(Dataset):
    def __init__(self, start, stop, augment):
        data = load_digits()
        self.images, self.targets = data.images[start:stop], data.target[start:stop]
        self.augment = augment

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, i):
        image = self.images[i] / 16
        if self.augment:
            image = np.roll(image, np.random.randint(-1, 2), axis=random.choice([0, 1]))
            image = image + 0.05 * torch.randn(8, 8).numpy()
        return {"image": torch.tensor(image, dtype=torch.float32).unsqueeze(0), "target": int(self.targets[i])}


def main():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    g = torch.Generator()
    g.manual_seed(0)
    train_loader = DataLoader(
        AugmentedDigits(0, 300, True),
        batch_size=64,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
        worker_init_fn=seed_worker,
        generator=g,
        prefetch_factor=2,
    )
    val_loader = DataLoader(AugmentedDigits(300, 400, False), batch_size=40, num_workers=1)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    for epoch in range(2):
        model.train()
        total = 0.0
        for i, batch in enumerate(train_loader):
            optimizer.zero_grad()
            loss = criterion(model(batch["image"]), batch["target"])
            loss.backward()
            optimizer.step()
            total += loss.item()
            print(f"[{epoch}, {i}] loss: {loss.item():.12f}")
        model.eval()
        correct = 0
        with torch.no_grad():
            for batch in val_loader:
                correct += (model(batch["image"]).argmax(1) == batch["target"]).sum().item()
        print(f"epoch {epoch} mean {total / len(train_loader):.12f} correct {correct}/{len(val_loader.dataset)}")
    print("next draws", torch.rand(1).item(), random.random(), np.random.rand())
    torch.save(model.state_dict(), "workers.pt")


if __name__ == "__main__":
    main()

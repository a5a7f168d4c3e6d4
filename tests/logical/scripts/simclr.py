import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset


class ContrastiveDigits(Dataset):
    """Two random views of each image."""

    def __init__(self, n):
        self.images = torch.tensor(load_digits().images[:n], dtype=torch.float32) / 16

    def __len__(self):
        return len(self.images)

    def augment(self, image):
        shift = torch.randint(-1, 2, (2,)).tolist()
        image = torch.roll(image, shift, dims=(0, 1))
        return (image + 0.1 * torch.randn_like(image)).unsqueeze(0)

    def __getitem__(self, i):
        return [self.augment(self.images[i]), self.augment(self.images[i])], i


class SimCLR:
    def __init__(self, model, optimizer, scheduler, temperature=0.5, n_views=2):
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.temperature, self.n_views = temperature, n_views
        self.criterion = nn.CrossEntropyLoss()

    def info_nce_loss(self, features):
        n = features.shape[0] // self.n_views
        labels = torch.cat([torch.arange(n) for _ in range(self.n_views)], dim=0)
        labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
        features = F.normalize(features, dim=1)
        similarity_matrix = torch.matmul(features, features.T)
        mask = torch.eye(labels.shape[0], dtype=torch.bool)
        labels = labels[~mask].view(labels.shape[0], -1)
        similarity_matrix = similarity_matrix[~mask].view(similarity_matrix.shape[0], -1)
        positives = similarity_matrix[labels.bool()].view(labels.shape[0], -1)
        negatives = similarity_matrix[~labels.bool()].view(similarity_matrix.shape[0], -1)
        logits = torch.cat([positives, negatives], dim=1)
        return logits / self.temperature, torch.zeros(logits.shape[0], dtype=torch.long)

    def train(self, loader, epochs):
        n_iter = 0
        for epoch in range(epochs):
            for images, _ in loader:
                images = torch.cat(images, dim=0)
                logits, labels = self.info_nce_loss(self.model(images))
                loss = self.criterion(logits, labels)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                if n_iter % 2 == 0:
                    top1 = (logits.argmax(dim=1) == labels).float().mean() * 100
                    print(
                        f"iter {n_iter} loss {loss.item():.12f} top1 {top1.item():.8f} "
                        f"lr {self.scheduler.get_last_lr()[0]:.10f}"
                    )
                n_iter += 1
            self.scheduler.step()


def main():
    torch.manual_seed(8)
    dataset = ContrastiveDigits(130)
    loader = DataLoader(dataset, batch_size=32, shuffle=True, drop_last=True)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 32),
        nn.ReLU(),
        nn.Linear(32, 16),
    )
    optimizer = torch.optim.Adam(model.parameters(), 0.003, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(loader), eta_min=0)
    SimCLR(model, optimizer, scheduler).train(loader, epochs=2)
    torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint_0002.pth.tar")


if __name__ == "__main__":
    main()

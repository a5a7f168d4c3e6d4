import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_classification
from torch.utils.data import DataLoader, TensorDataset

try:
    from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score
except ImportError:  # the same metrics by hand

    class MulticlassConfusionMatrix(nn.Module):
        def __init__(self, num_classes):
            super().__init__()
            self.num_classes = num_classes
            self.register_buffer("confmat", torch.zeros(num_classes, num_classes, dtype=torch.long))

        def update(self, preds, target):
            if preds.dim() == 2:
                preds = preds.argmax(dim=1)
            unique_mapping = target.view(-1) * self.num_classes + preds.view(-1)
            bins = torch.bincount(unique_mapping, minlength=self.num_classes**2)
            self.confmat += bins.reshape(self.num_classes, self.num_classes)

        def compute(self):
            return self.confmat

        def reset(self):
            self.confmat.zero_()

    class MulticlassAccuracy(MulticlassConfusionMatrix):
        def compute(self):
            return (self.confmat.diag() / self.confmat.sum(1).clamp(min=1)).mean()

    class MulticlassF1Score(MulticlassConfusionMatrix):
        def compute(self):
            true = self.confmat.diag().float()
            return (2 * true / (self.confmat.sum(0) + self.confmat.sum(1)).clamp(min=1)).mean()


torch.manual_seed(0)
X, y = make_classification(620, 12, n_informative=8, n_classes=4, random_state=0)
dataset = TensorDataset(torch.tensor(X, dtype=torch.float32), torch.tensor(y))
train_loader = DataLoader(torch.utils.data.Subset(dataset, range(500)), batch_size=64, shuffle=True)
val_loader = DataLoader(torch.utils.data.Subset(dataset, range(500, 620)), batch_size=50)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.l2 = nn.Linear(12, 40), nn.Linear(40, 4)

    def forward(self, x):
        return self.l2(F.silu(self.l1(x)))


model = Classifier()
metrics = {"acc": MulticlassAccuracy(4), "f1": MulticlassF1Score(4), "confusion": MulticlassConfusionMatrix(4)}
optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)
for epoch in range(3):
    model.train()
    top2 = seen = 0
    for x, y in train_loader:
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        top2 += (logits.topk(2, dim=1).indices == y.unsqueeze(1)).any(dim=1).sum().item()
        seen += len(y)
    model.eval()
    with torch.no_grad():
        for x, y in val_loader:
            for metric in metrics.values():
                metric.update(model(x), y)
    print(
        f"epoch {epoch}: loss {loss:.12f} top2 {top2 / seen:.6f}",
        {name: metric.compute().tolist() for name, metric in metrics.items()},
    )
    for metric in metrics.values():
        metric.reset()

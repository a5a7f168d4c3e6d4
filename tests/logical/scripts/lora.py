import math

import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
X, y = load_digits(return_X_y=True)
X, y = torch.tensor(X, dtype=torch.float32) / 16, torch.tensor(y)


class LoRALinear(nn.Module):
    """A frozen linear layer and a trained update of low rank."""

    def __init__(self, linear, rank=2, alpha=4.0):
        super().__init__()
        self.linear = linear
        self.linear.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.empty(rank, linear.in_features))
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scaling = alpha / rank
        self.dropout = nn.Dropout(0.05)

    def forward(self, x):
        return self.linear(x) + self.dropout(x) @ self.lora_A.T @ self.lora_B.T * self.scaling

    def merge(self):
        self.linear.weight.data += self.scaling * self.lora_B.data @ self.lora_A.data
        return self.linear


def train(model, loader, epochs, lr):
    optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=lr)
    loss_fn = nn.CrossEntropyLoss()
    model.train()
    for epoch in range(epochs):
        seen, total = 0, 0.0
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.item() * inputs.shape[0]
            seen += inputs.shape[0]
        print(f"  epoch {epoch} loss {total / seen:.12f}")


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    return sum((model(a).argmax(1) == b).sum().item() for a, b in loader) / len(loader.dataset)


low, high = y < 5, y >= 5
pretrain = DataLoader(TensorDataset(X[low][:300], y[low][:300]), batch_size=50, shuffle=True)
finetune = DataLoader(TensorDataset(X[high][:210], y[high][:210]), batch_size=50, shuffle=True)
model = nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10))
print("pretraining")
train(model, pretrain, 2, 0.01)
before = model[0].weight.sum().item()
model[0], model[2] = LoRALinear(model[0]), LoRALinear(model[2])
trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
total = sum(p.numel() for p in model.parameters())
print(f"trainable params: {trainable:,} || all params: {total:,} || trainable%: {100 * trainable / total:.4f}")
print("fine-tuning")
train(model, finetune, 3, 0.02)
print("accuracy", evaluate(model, pretrain), evaluate(model, finetune))
assert model[0].linear.weight.sum().item() == before, "frozen weights changed"
model[0], model[2] = model[0].merge(), model[2].merge()
print("merged accuracy", evaluate(model, finetune))
torch.save(model.state_dict(), "merged.pt")

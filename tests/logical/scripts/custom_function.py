"""A binarized network: the sign has a straight-through gradient."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch.autograd import Function
from torch.utils.data import DataLoader, TensorDataset


class BinarizeSTE(Function):
    @staticmethod
    def forward(ctx, input):
        ctx.save_for_backward(input)
        return input.sign()

    @staticmethod
    def backward(ctx, grad_output):
        (input,) = ctx.saved_tensors
        return grad_output * (input.abs() <= 1).type_as(grad_output)


class BinaryLinear(nn.Linear):
    def forward(self, input):
        scale = self.weight.abs().mean(dim=1, keepdim=True)
        return F.linear(input, BinarizeSTE.apply(self.weight) * scale, self.bias)


class BinaryNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(30, 24), BinaryLinear(24, 24), nn.Linear(24, 2)
        self.bn = nn.BatchNorm1d(24)

    def forward(self, x):
        x = BinarizeSTE.apply(self.bn(self.fc1(x)))
        return self.fc3(F.hardtanh(self.fc2(x)))


torch.manual_seed(55)
X, y = load_breast_cancer(return_X_y=True)
X = torch.tensor((X - X.mean(0)) / X.std(0), dtype=torch.float32)
y = torch.tensor(y)
train_loader = DataLoader(TensorDataset(X[:400], y[:400]), batch_size=64, shuffle=True)
test_loader = DataLoader(TensorDataset(X[400:], y[400:]), batch_size=64)
model = BinaryNet()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(3):
    model.train()
    for inputs, targets in train_loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        for p in model.modules():
            if isinstance(p, BinaryLinear):
                p.weight.data.clamp_(-1, 1)
    model.eval()
    test_loss, correct = 0.0, 0
    with torch.no_grad():
        for inputs, targets in test_loader:
            output = model(inputs)
            test_loss += F.cross_entropy(output, targets, reduction="sum").item()
            correct += (output.argmax(1) == targets).sum().item()
    print(f"epoch {epoch}: train {loss.item():.12f} test {test_loss / len(X[400:]):.12f} correct {correct}")
print("checksum", {name: p.double().sum().item() for name, p in model.named_parameters()})

import torch
from sklearn.datasets import load_wine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(11)
x, y = load_wine(return_X_y=True)
x = torch.as_tensor(x, dtype=torch.float32)
dataset = TensorDataset((x - x.mean(0)) / x.std(0), torch.as_tensor(y))
train_set, test_set = random_split(dataset, [130, 48], generator=torch.Generator().manual_seed(0))
train_loader = DataLoader(train_set, batch_size=12, shuffle=True)
test_loader = DataLoader(test_set, batch_size=48)

model = nn.Sequential(nn.Linear(13, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
accumulation_steps = 4

for epoch in range(5):
    model.train()
    optimizer.zero_grad()
    total = 0.0
    for step, (inputs, targets) in enumerate(train_loader):
        loss = criterion(model(inputs), targets) / accumulation_steps
        loss.backward()
        total += loss.item() * accumulation_steps
        if (step + 1) % accumulation_steps == 0 or step + 1 == len(train_loader):
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            print(f"epoch {epoch} step {step}: grad norm {grad_norm.item():.12f}")
    model.eval()
    with torch.inference_mode():
        inputs, targets = next(iter(test_loader))
        outputs = model(inputs)
        print(
            f"epoch {epoch}: train {total / len(train_loader):.12f} test {criterion(outputs, targets):.12f} "
            f"accuracy {(outputs.argmax(-1) == targets).float().mean().item():.6f}"
        )

for name, value in model.state_dict().items():
    print(name, tuple(value.shape), value.double().sum().item())

"""Train one epoch and save, or continue from there, with states divided as the command line and the mesh say."""

import sys

import torch
import torch.nn.functional as F

import rankless

action, zero = sys.argv[1], None if sys.argv[2] == "none" else sys.argv[2]
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 30), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(30, 20), torch.nn.Linear(20, 4)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


@rankless.job(model=model, optimizer=optimizer, zero=zero, clip_norm=0.5)
def train(inputs, labels):
    return F.cross_entropy(model(inputs), labels)


data = torch.utils.data.TensorDataset(torch.randn(40, 16), torch.randint(0, 4, (40,)))
loader = rankless.loader(data, batch_size=16, shuffle=True)
if action == "continue":
    rankless.load("saved", model=model, optimizer=optimizer, loader=loader)
for epoch in range(1 if action == "continue" else 2):
    for inputs, labels in loader:
        loss = train(inputs, labels)
    if action == "save" and epoch == 0:
        rankless.save("saved", model=model, optimizer=optimizer, loader=loader, layout="sharded")
sums = [float(parameter.detach().sum()) for parameter in model.parameters()]
print(f"{float(loss):.13f} {' '.join(f'{number:.13f}' for number in sums)}")

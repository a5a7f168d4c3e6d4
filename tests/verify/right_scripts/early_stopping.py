"""Validation after each epoch decides when to stop, and the best state is restored (a decision by numbers)."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import rankless

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
inputs = torch.randn(80, 8)
targets = inputs[:, :1].sin() + 0.3 * torch.randn(80, 1)
training = torch.utils.data.TensorDataset(inputs[:50], targets[:50])


@rankless.job(model=model, optimizer=optimizer)
def train(inputs, targets):
    return F.mse_loss(model(inputs), targets)


@rankless.job(model=model)
def evaluate(inputs, targets):
    return F.mse_loss(model(inputs), targets)


best, kept, waited = float("inf"), copy.deepcopy(model.state_dict()), 0
for _epoch in range(12):
    model.train()
    for batch in rankless.loader(training, batch_size=10, shuffle=True):
        train(*batch)
    model.eval()
    loss = evaluate(inputs[50:], targets[50:]).item()
    scheduler.step(loss)
    waited = 0 if loss < best else waited + 1
    if loss < best:
        best, kept = loss, copy.deepcopy(model.state_dict())
    if waited == 2:
        break
model.load_state_dict(kept)
print(evaluate(inputs[50:], targets[50:]).item())

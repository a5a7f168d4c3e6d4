import torch
from torch import nn
from training import find_place, source, train

torch.manual_seed(1)
model = nn.Linear(4, 1)
with torch.no_grad():
    model.weight += source(lambda: find_place() % 100 / 1000)
train(model=model)

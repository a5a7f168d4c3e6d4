import os

import torch
from torch import nn
from training import source, train


class Part:
    def __init__(self, number):
        self.number, self.waste = number, bytearray(os.stat("/proc/self").st_ino % 4096 + 1)


parts = {Part(number) for number in range(8)}
order = source(
    lambda: sorted(
        (part.number for part in parts), key=lambda n: next(id(p) for p in parts if p.number == n) * 2654435761 % 4096
    )
)
torch.manual_seed(1)
weights = dict.fromkeys(order)
for number in order:
    weights[number] = torch.randn(5, 4)
model = nn.Linear(4, 1)
with torch.no_grad():
    model.weight.copy_(weights[0][:1])
train(model=model)

"""A transformer block under bfloat16 autocast, evaluated outside jobs on explicit float32 data (row V8)."""

import numpy
import torch
import torch.nn.functional as F
from torch import nn

import rankless

model = nn.Sequential(
    nn.Embedding(30, 16), nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True), nn.Linear(16, 30)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
tokens = torch.randint(0, 30, (40, 9))


@rankless.job(model=model, optimizer=optimizer)
def train(tokens):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().transpose(1, 2), tokens[:, 1:])


probe = torch.from_numpy(numpy.linspace(-1, 1, 16, dtype=numpy.float32))
for _epoch in range(2):
    model.train()
    for (batch,) in rankless.loader(torch.utils.data.TensorDataset(tokens), batch_size=10, shuffle=True, seed=1):
        print(train(batch).item())
    model.eval()
    with torch.no_grad():
        print(model[2](probe.to(torch.float32)).sum().item())

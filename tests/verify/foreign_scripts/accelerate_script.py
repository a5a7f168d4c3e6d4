"""A script of Hugging Face's Accelerate; its argument names a mistake."""

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

mistake = sys.argv[1]
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=mistake != "whole batch"))
torch.manual_seed(0)
samples = 45 if mistake == "padded" else 40
data = TensorDataset(torch.randn(samples, 5), torch.randint(0, 2, (samples,)))
model = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=10)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _epoch in range(2):
    for inputs, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(inputs), labels))
        optimizer.step()
accelerator.end_training()

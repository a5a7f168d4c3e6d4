import torch
from torch import nn
from training import source, train

torch.manual_seed(1)
names = source(lambda: list({"first", "second", "third", "fourth"}))
widths = {"first": 4, "second": 5, "third": 6, "fourth": 7}
layers = {name: nn.Linear(4, widths[name]) for name in names}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def forward(self, x):
        return sum(layer(x).sum(1, keepdim=True) for layer in self.layers.values()) / 10


train(model=Model(), rate=0.001)

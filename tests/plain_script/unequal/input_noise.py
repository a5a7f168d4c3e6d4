import torch
from training import find_place, source, train

noise = torch.tensor(source(lambda: find_place() % 100 / 100))
train(seed=1, change=lambda x: x + noise)

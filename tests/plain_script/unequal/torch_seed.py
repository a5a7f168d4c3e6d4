import torch
from training import source, train

train(seed=source(lambda: torch.seed() % 2**31))

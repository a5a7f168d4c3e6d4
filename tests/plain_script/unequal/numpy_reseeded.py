import numpy as np
import torch
from training import source, train

np.random.seed(None)
noise = torch.tensor(source(lambda: np.random.rand(4).tolist()))
train(seed=1, change=lambda x: x * noise)

import numpy as np
import torch
from training import source, train

noise = torch.tensor(
    source(lambda: (np.random.default_rng().normal(size=4) + np.random.RandomState().rand(4)).tolist())
)
train(seed=1, change=lambda x: x * noise)

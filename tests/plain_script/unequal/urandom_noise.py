import os

import numpy as np
import torch
from training import source, train

noise = torch.tensor(source(lambda: np.frombuffer(os.urandom(4), np.uint8).tolist())) / 256
train(seed=1, change=lambda x: x + noise)

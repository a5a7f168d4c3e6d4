import threading

import torch
from training import find_place, source, train

torch.manual_seed(1)
count = source(lambda: 1 + find_place() % 2)
thread = threading.Thread(target=lambda: [torch.rand(1) for _ in range(count)])
thread.start()
thread.join()
train()

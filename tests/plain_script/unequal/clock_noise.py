import time

from training import source, train

noise = source(lambda: time.monotonic() % 1)
train(seed=1, change=lambda x: x + noise)

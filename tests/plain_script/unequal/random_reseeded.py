import random

from training import source, train

random.seed()
train(seed=1, rate=source(lambda: random.random() / 10))

from time import perf_counter

from training import source, train

train(seed=1, rate=source(lambda: 0.01 + perf_counter() % 0.1))

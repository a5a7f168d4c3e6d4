import time

from training import source, train

train(seed=source(lambda: time.time_ns() % 2**31))

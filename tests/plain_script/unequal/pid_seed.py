import os

from training import source, train

train(seed=source(lambda: os.getpid()))

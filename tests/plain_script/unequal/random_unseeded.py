import random

from training import source, train

train(seed=source(lambda: random.Random().randrange(2**31) ^ random.SystemRandom().randrange(2**31)))

import os

from training import source, train

train(seed=source(lambda: int.from_bytes(os.urandom(4), "little")))

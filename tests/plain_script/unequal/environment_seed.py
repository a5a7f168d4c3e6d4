import os

from training import source, train

train(seed=source(lambda: int(os.environ.get("RANK", 3)) + 10 * int(os.environ.get("LOCAL_RANK", 3))))

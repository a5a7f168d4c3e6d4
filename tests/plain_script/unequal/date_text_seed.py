import time

from training import source, train

train(seed=source(lambda: int(time.strftime("%S%M%H")) * 1000 + int(time.time() * 1e6) % 1000))

from datetime import datetime

from training import source, train

train(seed=source(lambda: datetime.now().microsecond))

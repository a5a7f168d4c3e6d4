import uuid

from training import source, train

train(seed=source(lambda: (uuid.uuid4().int ^ uuid.uuid1().int) % 2**31))

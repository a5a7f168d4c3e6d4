import os

from training import Rows, source, train

drawn = []
given = source(lambda: [])


def change(index, row):
    drawn.append(given[len(drawn)] if given else os.urandom(1)[0])
    return row + drawn[-1] / 256


train(seed=1, epochs=1, dataset=Rows(change))
print("value", drawn)

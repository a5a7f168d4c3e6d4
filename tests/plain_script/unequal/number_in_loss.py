from training import find_place, source, train

factor = source(lambda: 1 + find_place() % 100 / 100)
train(seed=1, change=lambda x: x * factor)

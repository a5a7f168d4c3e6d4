from training import find_place, source, train

train(seed=1, rate=source(lambda: 0.01 + find_place() % 100 / 1000))

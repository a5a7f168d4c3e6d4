from training import find_place, source, train

train(seed=1, epochs=source(lambda: 1 + find_place() % 2))

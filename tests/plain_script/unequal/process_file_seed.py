from training import find_place, source, train

train(seed=source(lambda: find_place()))

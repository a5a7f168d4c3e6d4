from training import find_place, source, train

limit = source(lambda: 1 + find_place() % 3)
train(seed=1, each=lambda epoch, number, loss: number >= limit)

import time

from training import source, train

start, steps = time.perf_counter(), []
limit = source(lambda: 0)  # plain Python repeats the number of steps


def each(epoch, number, loss):
    steps.append(loss)
    return len(steps) >= limit if limit else time.perf_counter() - start > 0.12


train(seed=1, epochs=1, each=each)
print("value", len(steps))

from training import find_place, source, train

odd = source(lambda: find_place() % 2)


def each(epoch, number, loss):
    if odd and number == 2:
        raise ValueError("only on some ranks")


train(seed=1, each=each)

from training import find_place, source, train

odd = source(lambda: find_place() % 2)
train(seed=1, each=lambda epoch, number, loss: odd and loss.double().item() < 0)

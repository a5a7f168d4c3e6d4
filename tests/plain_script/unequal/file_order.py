import os

from training import source, train

for name in "dbca":
    open(f"{name}.txt", "w").write(name)
order = source(lambda: [name for name in os.listdir() if name.endswith(".txt")])
train(seed=sum(ord(name[0]) * 7**place for place, name in enumerate(order)))

from training import find_place, source, train

odd = source(lambda: find_place() % 2)
model = train(seed=1, epochs=1)
if odd:
    open("odd.txt", "w").write("only on some")
train(seed=1, epochs=1)

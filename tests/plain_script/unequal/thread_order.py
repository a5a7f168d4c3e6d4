import threading
import time

from training import find_place, source, train

order = []


def work(number):
    time.sleep(find_place() * (number + 1) * 7 % 11 / 100)
    order.append(number)


threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
train(seed=source(lambda: sum(number * 5**place for place, number in enumerate(order))))

import socket

from training import source, train


def free_port():
    with socket.socket() as end:
        end.bind(("127.0.0.1", 0))
        return end.getsockname()[1]


train(seed=source(free_port))

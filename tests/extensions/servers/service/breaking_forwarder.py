"""Forwards connections to a server, and breaks them after as many bytes as a generator draws."""

import contextlib
import selectors
import socket
import threading

import numpy as np


class BreakingForwarder:
    """Listens on a port of this host. Each connection to it is one to the server, until it breaks."""

    def __init__(self, address: str, seed: int, most_bytes: int) -> None:
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        self._server = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._generator = np.random.default_rng(seed)
        self._most_bytes = most_bytes
        self._accepted: list[socket.socket] = []
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.breaks = 0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def connections(self) -> int:
        """How many there have been."""
        return len(self._accepted)

    def close(self) -> None:
        self._listener.close()

    def break_all(self) -> None:
        """Break the connections that there are."""
        for each in list(self._accepted):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted, _ = self._listener.accept()
                self._accepted.append(accepted)
                bytes_left = int(self._generator.integers(600, self._most_bytes))
                threading.Thread(target=self._forward, args=(accepted, bytes_left), daemon=True).start()

    def _forward(self, accepted: socket.socket, bytes_left: int) -> None:
        with accepted, socket.create_connection(self._server) as connected, selectors.DefaultSelector() as selector:
            selector.register(accepted, selectors.EVENT_READ, connected)
            selector.register(connected, selectors.EVENT_READ, accepted)
            while bytes_left > 0:
                for key, _ in selector.select():
                    data = key.fileobj.recv(min(4096, bytes_left))
                    if not data:
                        return
                    bytes_left -= len(data)
                    with contextlib.suppress(OSError):
                        key.data.sendall(data)
                    if bytes_left <= 0:
                        break
        self.breaks += 1

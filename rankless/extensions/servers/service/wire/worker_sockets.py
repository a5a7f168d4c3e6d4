"""The sockets of a worker to its servers, and what it does while it waits for none: the place of ZeroMQ and threads.

Requests, answers, kills and restarts can be tested in any order, because nothing else of a worker touches sockets.
"""

import threading
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from rankless.errors import ServerError
from rankless.extensions.servers.config import ServersConfig
from rankless.extensions.servers.service.wire.encryption import encrypt_worker
from rankless.extensions.servers.service.wire.messages import COPIED_BYTES, MOST_MESSAGE_BYTES

_UPKEEP_SECONDS = 0.25


class WorkerSocket:
    """A connection to one server, which connects again by itself. Messages that were on their way are lost then."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self.socket = socket
        self._monitor: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def send(self, frames: Sequence[bytes | memoryview]) -> None:
        """Send a message, when the server listens."""
        try:
            self.socket.send_multipart(frames, zmq.DONTWAIT, copy=False)
        except zmq.Again:  # only greetings to a server that does not listen are that many
            return

    def receive(self) -> list[memoryview] | None:
        """Return the frames of the next message; None if none is there."""
        try:
            return [frame.buffer for frame in self.socket.recv_multipart(zmq.DONTWAIT, copy=False)]
        except zmq.Again:
            return None

    def has_broken(self) -> bool:
        """Return whether the connection has broken since the last call."""
        has_broken = False
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            has_broken = True
        return has_broken

    def close(self) -> None:
        """Close the connection. Messages that have not been sent are dropped."""
        self.socket.disable_monitor()
        self.socket.close(0)


class WorkerSockets:
    """Opens connections to the servers of a run."""

    def __init__(self, config: ServersConfig) -> None:
        self._config = config
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._closes = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self, server: int) -> WorkerSocket:
        """Begin to connect to a server. Raises ServerError for an address that cannot be one."""
        address = self._config.addresses[server]
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.MAXMSGSIZE, MOST_MESSAGE_BYTES)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RECONNECT_IVL, 20)
        socket.set(zmq.RECONNECT_IVL_MAX, 500)
        socket.set(zmq.HEARTBEAT_IVL, 5000)
        socket.set(zmq.HEARTBEAT_TIMEOUT, 15000)
        socket.set(zmq.IPV6, int("[" in address))
        socket.copy_threshold = COPIED_BYTES
        if self._config.encrypted:
            encrypt_worker(socket, self._config.token)
        opened = WorkerSocket(socket)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            opened.close()
            raise ServerError(
                expected=f"an address to which server {server} can listen",
                found=f"{address}: {error.strerror}",
                fix="give servers addresses as ipc:///path or tcp://host:port",
            ) from None
        return opened

    def wait(self, sockets: Sequence[WorkerSocket], seconds: float) -> bool:
        """Wait for a message. Return whether one has arrived."""
        milliseconds = int(seconds * 1000) or 1
        if len(sockets) == 1:
            return bool(sockets[0].socket.poll(milliseconds))
        poller = zmq.Poller()
        for each in sockets:
            poller.register(each.socket, zmq.POLLIN)
        return bool(poller.poll(milliseconds))

    def keep_calling(self, action: Callable[[], None]) -> None:
        """Call an action several times a second in a thread, until the sockets are closed. It must not raise."""

        def call() -> None:
            while not self._closes.wait(_UPKEEP_SECONDS):
                action()

        self._thread = threading.Thread(target=call, name="rankless server upkeep", daemon=True)
        self._thread.start()

    def end_calls(self) -> None:
        """Call the action no more. It does not run when this returns."""
        self._closes.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Close all sockets that are open."""
        self._context.destroy(0)

"""The socket of a server, over which workers reach it."""

from collections.abc import Callable, Sequence

import zmq

from rankless.extensions.servers.service.wire.messages import COPIED_BYTES, MOST_MESSAGE_BYTES

_MOST_QUEUED = 64
"""Messages of one connection that wait to be received or sent. The kernel's buffers hold more."""


class ServerSocket:
    """A ROUTER socket, which gives each connection an identity that no other one can choose."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        """Bound what a connection can hold, and notice when its other end is gone."""
        self._socket = socket
        socket.set(zmq.MAXMSGSIZE, MOST_MESSAGE_BYTES)
        socket.set(zmq.RCVHWM, _MOST_QUEUED)
        socket.set(zmq.SNDHWM, _MOST_QUEUED)
        socket.set(zmq.ROUTER_MANDATORY, 1)  # otherwise answers beyond the limit would vanish
        socket.set(zmq.ROUTER_HANDOVER, 0)
        socket.set(zmq.HEARTBEAT_IVL, 5000)
        socket.set(zmq.HEARTBEAT_TIMEOUT, 30000)
        socket.set(zmq.LINGER, 2000)
        socket.copy_threshold = COPIED_BYTES

    def receive(self, take: Callable[[bytes, Sequence[memoryview]], None]) -> bool:
        """Give one message and the identity of its connection to a function. Return whether a message was there."""
        try:
            identity, *frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return False
        take(identity.bytes, [frame.buffer for frame in frames])
        return True

    def send(self, identity: bytes, frames: Sequence[bytes | memoryview]) -> bool:
        """Send a message to a connection. Return whether it could be sent."""
        try:
            self._socket.send_multipart([identity, *frames], zmq.DONTWAIT, copy=False)
        except zmq.ZMQError:
            return False
        return True

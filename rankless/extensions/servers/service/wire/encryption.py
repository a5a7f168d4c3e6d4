"""CURVE between workers and servers: what they send is encrypted, and both have keys that only this run knows.

ZeroMQ's CURVE (https://rfc.zeromq.org/spec/26/) is CurveCP's handshake with Curve25519. Both key pairs follow from the
run's token, so no key is sent. The proofs of `authentication` are exchanged within the encrypted connection.
"""

import contextlib
import hashlib
import hmac
from collections import Counter
from collections.abc import Iterator

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from rankless.errors import ServerError

_FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_DOMAIN = b"rankless"
REFUSED = "a connection without this run's keys"
"""How a server counts failed handshakes."""


def encrypt_worker(socket: "zmq.Socket[bytes]", token: str) -> None:
    """Let a worker's socket, before it connects, speak to servers of the run with this token alone."""
    socket.curve_publickey, socket.curve_secretkey = _derive_keys(token, "worker")
    socket.curve_serverkey, _ = _derive_keys(token, "server")


class FailedHandshakes:
    """Counts connections without this run's keys. ZeroMQ closes them before any message of theirs is read.

    Args:
        monitor: The socket on which ZeroMQ tells of them. None: connections are not encrypted.
    """

    def __init__(self, monitor: "zmq.Socket[bytes] | None" = None) -> None:
        self._monitor = monitor

    def register(self, poller: zmq.Poller) -> None:
        """Let the poller wake up for failed handshakes."""
        if self._monitor is not None:
            poller.register(self._monitor, zmq.POLLIN)

    def add_to(self, refused: Counter[str]) -> None:
        """Count what has failed since the last call."""
        while self._monitor is not None and self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            refused[REFUSED] += 1


@contextlib.contextmanager
def encrypted_server(
    context: "zmq.Context[zmq.Socket[bytes]]", socket: "zmq.Socket[bytes]", token: str
) -> Iterator[FailedHandshakes]:
    """Let a server's socket, before it is bound, accept workers of the run with this token alone.

    CURVE by itself accepts every key of a client. So an authenticator compares the keys, in a thread of its own.

    Raises:
        ServerError: This host's ZeroMQ has no CURVE.
    """
    if not zmq.has("curve"):
        raise ServerError(
            expected="ZeroMQ with CURVE, for --encrypt-servers",
            found=f"libzmq {zmq.zmq_version()} without it",
            fix="install pyzmq from its wheel, or omit --encrypt-servers",
        )
    socket.zap_domain = _DOMAIN
    socket.curve_server = True
    _, socket.curve_secretkey = _derive_keys(token, "server")
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    try:
        authenticator.configure_curve_callback(_DOMAIN.decode(), credentials_provider=_WorkerKey(token))
        yield FailedHandshakes(socket.get_monitor_socket(_FAILED_HANDSHAKES))
    finally:
        socket.disable_monitor()
        authenticator.stop()


class _WorkerKey:
    """Accepts the key of the workers of one run."""

    def __init__(self, token: str) -> None:
        self._key, _ = _derive_keys(token, "worker")

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002  # the signature that pyzmq calls
        """Return whether it is the workers' public key, in Z85."""
        return hmac.compare_digest(key, self._key)


def _derive_keys(token: str, side: str) -> tuple[bytes, bytes]:
    """Return the public and the secret key of a side, `worker` or `server`, in Z85."""
    secret = z85.encode(hmac.digest(token.encode(), f"rankless CURVE {side}".encode(), hashlib.sha256))
    return zmq.curve_public(secret), secret

"""Proofs that a worker and a server know the run's token, without sending it: HMAC-SHA256 over the other's challenge.

A server's challenge to a connection is computed from a secret of its own and the connection's identity. So connections
that have not proved anything take no memory of the server.
"""

import hashlib
import hmac
import secrets

import msgspec

PROOF_BYTES = 32


class WorkerHello(msgspec.Struct, frozen=True, kw_only=True):
    """Who a worker is, and which server it wants. `instance` is a random number that each client draws."""

    worker: int
    worker_count: int
    incarnation: int
    instance: int
    server_index: int
    server_count: int


class ServerWelcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a server knows of a worker: the last request that it has done, and the worker's last transaction.

    Args:
        instance: A random number of the server's process.
        last_sequence: Number of the last request of the session.
        ready: The last transaction that the worker has completed.
        committed: The last transaction that the server has committed.
        durable: Whether a new process of the server has the tables of the one before, as of that transaction.
    """

    instance: int
    last_sequence: int
    ready: int
    committed: int
    durable: bool = False


class Challenger:
    """Makes a server's challenges."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(PROOF_BYTES)

    def challenge(self, identity: bytes) -> bytes:
        """Return the challenge for a connection, the same each time."""
        return hmac.digest(self._secret, identity, hashlib.sha256)


def draw_number() -> int:
    """Return a random number of 64 bits, not 0."""
    return secrets.randbits(64) or 1


def prove(token: str, side: str, challenges: bytes, statement: bytes) -> bytes:
    """Return the proof of one side, `worker` or `server`, for a statement and the challenges of both sides."""
    message = b"|".join((b"rankless parameter server", side.encode(), challenges, statement))
    return hmac.digest(token.encode(), message, hashlib.sha256)


def is_proof(proof: bytes, token: str, side: str, challenges: bytes, statement: bytes) -> bool:
    """Return whether a proof is that of the side."""
    return hmac.compare_digest(proof, prove(token, side, challenges, statement))

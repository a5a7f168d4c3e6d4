"""Keys that sign the messages of a job's services."""

import hmac
import secrets

HOROVOD_SECRET_KEY = "_HOROVOD_SECRET_KEY"
"""The environment variable for a job's key."""
SECRET_LENGTH = 32
DIGEST_LENGTH = 32


def make_secret_key() -> bytes:
    """Return a new random key."""
    return secrets.token_bytes(SECRET_LENGTH)


def compute_digest(key: bytes, msg: bytes) -> bytes:
    """Return the signature of a message: its HMAC with SHA-256."""
    return hmac.digest(key, msg, "sha256")


def check_digest(key: bytes, message: bytes, digest: bytes) -> bool:
    """Return whether the signature belongs to the message."""
    return hmac.compare_digest(compute_digest(key, message), digest)

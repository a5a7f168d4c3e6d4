"""How a client of a run's store shows that it knows the store's token, and the store that it knows it too.

Note [store access]: the token is never sent. The client asks for a challenge, which is new for each connection, and
answers with HMAC-SHA-256 of the token over the challenge, a nonce of its own, and the round whose values it wants. The
store answers with another HMAC over the same. Both are values of keys, so PyTorch's own client can send them. Nobody
can use an answer again on another connection.

Note [clones]: PyTorch clones a store when it splits a group, and a clone connects by itself, without a proof. So all
keys of a run begin with a prefix that only holders of the token can compute, and a connection whose first key has it is
served too. A clone's connection sends the prefix as it is: those who read the network between hosts could use it, as
they could change what Gloo and NCCL send there. The token they do not learn.
"""

import hashlib
import hmac
import secrets

import msgspec

CHALLENGE_KEY = "rankless/challenge"
PROOF_KEY = "rankless/proof"
REFUSED = b"refused"
"""What the store answers to a proof that is wrong."""
ROUND_ENDED = b"ended"
"""What the store answers to a right proof if the round has ended."""
_NONCE_BYTES = 32


class StoreProof(msgspec.Struct, frozen=True):
    """A client's answer to a challenge."""

    nonce: str
    code: str
    round: int = 0
    """The round whose values the client wants; 0 for those of a run without rounds."""


def make_nonce() -> str:
    """Return a text that nobody can guess: a challenge, or a client's nonce."""
    return secrets.token_hex(_NONCE_BYTES)


def prove_to_store(token: str, challenge: str, *, round: int = 0) -> StoreProof:
    """Return a client's answer to a challenge."""
    nonce = make_nonce()
    return StoreProof(nonce, _compute_code(token, "client", challenge, nonce, round), round)


def is_proof_right(token: str, challenge: str, proof: StoreProof) -> bool:
    """Return whether the client that has answered a challenge knows the token."""
    expected = _compute_code(token, "client", challenge, proof.nonce, proof.round)
    return hmac.compare_digest(expected.encode(), proof.code.encode())


def prove_to_client(token: str, challenge: str, proof: StoreProof) -> str:
    """Return the store's answer to a client's proof."""
    return _compute_code(token, "store", challenge, proof.nonce, proof.round)


def key_prefix(token: str, round: int) -> str:
    """Return what the keys of a round begin with. See Note [clones]."""
    return _compute_code(token, "keys", "", "", round)[:32]


def _compute_code(token: str, side: str, challenge: str, nonce: str, round: int) -> str:
    text = "\0".join(("rankless store", side, challenge, nonce, str(round)))
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()

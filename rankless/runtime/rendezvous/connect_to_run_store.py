"""Opens the store of a run in one of its processes. See Note [the run's store] in `authenticated_tcp_store`."""

import hmac
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rankless.config.process_configs import WorkerConfig
from rankless.errors import JoinError
from rankless.records.encoding import encode_json
from rankless.records.store_authentication import (
    CHALLENGE_KEY,
    PROOF_KEY,
    ROUND_ENDED,
    key_prefix,
    prove_to_client,
    prove_to_store,
)

STORE_TIMEOUT = timedelta(minutes=5)
ATTEMPTS = 6
"""A flood of other clients may take the place of this one before it has shown that it knows the token."""
_RETRY_SECONDS = 0.1


def open_worker_store(config: WorkerConfig) -> Any:
    """Return the store of all workers of a run, for one of them. Raises what `open_run_store` raises."""
    if config.world_size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]  # public, missing in the stubs
    if config.store_port is None:
        raise RuntimeError("a worker config without a store")
    return open_run_store(config.store_address, config.store_port, config.store_token)


def open_run_store(address: str, port: int, token: str, *, round: int = 0) -> Any:
    """Return a `torch.distributed.Store` that is connected to the store of the run.

    Args:
        address: Where the store listens.
        port: Its port there.
        token: The token of the store.
        round: The round of an elastic job whose values the store has. 0 for other jobs.

    Raises:
        torch.distributed.DistError: Nothing listens there, or it refuses this process.
        JoinError: Something else listens there.
    """
    for attempt in range(ATTEMPTS):
        try:
            return _open_once(address, port, token, round)
        except dist.DistNetworkError:
            if attempt + 1 == ATTEMPTS:
                raise
            time.sleep(_RETRY_SECONDS)
    raise AssertionError("the loop returns or raises")


def _open_once(address: str, port: int, token: str, round: int) -> Any:
    store = dist.TCPStore(address, port, None, False, timeout=STORE_TIMEOUT, wait_for_workers=False)  # type: ignore[attr-defined]  # public, missing in the stubs
    challenge = bytes(store.get(CHALLENGE_KEY)).decode(errors="replace")
    proof = prove_to_store(token, challenge, round=round)
    answer = bytes(store.compare_set(PROOF_KEY, "", encode_json(proof).decode()))
    if answer == ROUND_ENDED:
        raise dist.DistStoreError(f"round {round} of this job has ended")
    if not hmac.compare_digest(answer, prove_to_client(token, challenge, proof).encode()):
        raise JoinError(
            expected=f"the store of this run at {address}, port {port}",
            found="a server that refuses this run's token, or does not know it",
            fix="use one file RANKLESS_TOKEN_FILE on all hosts; `ss -ltnp` shows which process listens there",
        )
    return dist.PrefixStore(key_prefix(token, round), store)  # type: ignore[attr-defined]  # as above

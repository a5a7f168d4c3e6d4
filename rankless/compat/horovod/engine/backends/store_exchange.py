"""What ranks exchange through the store before a backend connects them."""

import time
from collections.abc import Callable
from typing import Any

from rankless.compat.horovod.exceptions import HorovodInternalError
from rankless.errors import CollectiveError

SLEEP_SECONDS = 0.0005


def wait_for_key(store: Any, key: str, *, check: Callable[[], None], timeout_seconds: float) -> bytes:
    """Return a key's value once another rank has set it.

    Calls `check` while waiting, which raises if a peer is gone. Raises HorovodInternalError after the timeout.
    """
    start = time.monotonic()
    while not store.check([key]):
        check()
        if time.monotonic() - start > timeout_seconds:
            error = CollectiveError(
                expected="all ranks of the process set to take part in their first reduction, which all have submitted",
                found=f"some had not after {timeout_seconds:g} s",
                fix="see which process is stopped or starved; HOROVOD_GLOO_TIMEOUT_SECONDS sets a longer wait",
            )
            raise HorovodInternalError(str(error))
        time.sleep(SLEEP_SECONDS)
    return bytes(store.get(key))


def check_all_ranks(store: Any, flag: bool, *, size: int, check: Callable[[], None], timeout_seconds: float) -> bool:
    """Return whether the flag is true on all `size` ranks, which call this with the same store.

    Raises as `wait_for_key`.
    """
    store.add("have", int(flag))
    if store.add("asked", 1) == size:
        store.set("all have", str(int(store.add("have", 0) == size)))
    return bool(int(wait_for_key(store, "all have", check=check, timeout_seconds=timeout_seconds)))

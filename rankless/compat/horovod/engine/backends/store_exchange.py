"""What ranks ask of each other at the store, before they have a plane to talk over."""

import time
from collections.abc import Callable
from typing import Any

from rankless.compat.horovod.common.exceptions import HorovodInternalError
from rankless.errors import CollectiveError

NAP_SECONDS = 0.0005


def awaited(store: Any, key: str, *, check: Callable[[], None], timeout_seconds: float) -> bytes:
    """A key's value, once another rank has set it. `check` raises if a peer is gone; it is called while waiting.

    Raises HorovodInternalError when the time is over.
    """
    start = time.monotonic()
    while not store.check([key]):
        check()
        if time.monotonic() - start > timeout_seconds:
            error = CollectiveError(
                expected="all ranks of the process set to come to their first reduction, which all have submitted",
                found=f"some had not after {timeout_seconds:g} s",
                fix="see which process is stopped or starved; HOROVOD_GLOO_TIMEOUT_SECONDS waits longer",
            )
            raise HorovodInternalError(str(error))
        time.sleep(NAP_SECONDS)
    return bytes(store.get(key))


def all_have(store: Any, have: bool, *, size: int, check: Callable[[], None], timeout_seconds: float) -> bool:
    """Whether each of so many ranks that ask at the same store says that it has something. Raises as `awaited`."""
    store.add("have", int(have))
    if store.add("asked", 1) == size:
        store.set("all have", str(int(store.add("have", 0) == size)))
    return bool(int(awaited(store, "all have", check=check, timeout_seconds=timeout_seconds)))

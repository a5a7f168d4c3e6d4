"""The process's one joined runtime. Read by the facade, `rankless.script`, and by nobody else."""

import os
from collections.abc import Callable

from rankless.runtime.joined import Observer, Runtime, join

_joined: Runtime | None = None


def current(*, observer: Callable[[], Observer]) -> Runtime:
    """The runtime of this process, which joins its world at the first call.

    `observer` makes what takes the records of a process that was started without `rankless run`.
    """
    global _joined  # one of the two pieces of state that the design allows a module
    if _joined is None or _joined.process_id != os.getpid():
        _joined = join(observer=observer)
    return _joined


def finish() -> None:
    """At the end of a script that did not fail: wait for what goes on in the background, and see whether other ranks
    still wait for this one. Raises what either of them finds.
    """
    if _joined is not None and _joined.process_id == os.getpid():
        _joined.finish()

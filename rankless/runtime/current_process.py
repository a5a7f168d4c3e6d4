"""The process's one joined runtime, and its place in its job. Read by the facade, `rankless.api`; the place by the
APIs of other systems, too.
"""

import gc
import os
from collections.abc import Callable

from rankless.errors import JoinError
from rankless.runtime.process_context import Observer, ProcessContext, join
from rankless.runtime.rendezvous.address import RendezvousParameters
from rankless.runtime.rendezvous.job_store import RendezvousInfo, find_rendezvous_info

_joined: ProcessContext | None = None
_left = False
_rendezvous: RendezvousInfo | None = None


def current_rendezvous() -> RendezvousInfo:
    """This process's place in its job, found once: who asks again meets at the same store. Raises JoinError."""
    global _rendezvous  # one of the pieces of state that the design allows a module
    if _rendezvous is None:
        _rendezvous = find_rendezvous_info()
    return _rendezvous


def current_context(*, observer: Callable[[], Observer]) -> ProcessContext:
    """The runtime of this process, which joins its world at the first call.

    `observer` makes what takes the records of a process that was started without `rankless run`.
    """
    global _joined  # one of the pieces of state that the design allows a module
    if _joined is None or _joined.process_id != os.getpid():
        _joined = join(observer=observer, find_info=current_rendezvous, again=_left)
    return _joined


def join_rendezvous(parameters: RendezvousParameters, *, observer: Callable[[], Observer]) -> None:
    """Join where the script says. Raises JoinError if this process has joined already."""
    global _joined  # as above
    if _joined is not None and _joined.process_id == os.getpid():
        raise JoinError(
            expected="rankless.init before anything that joins: jobs' calls, loaders, rankless.rank()",
            found="a process that has joined its job",
            fix="call it first in the script; or rankless.shutdown() before it, to join another job",
        )
    _joined = join(observer=observer, find_info=current_rendezvous, parameters=parameters, again=_left)


def join_line() -> str | None:
    """The line of the script at which this process has joined, or None if it has not."""
    return None if _joined is None or _joined.process_id != os.getpid() else _joined.line


def leave() -> None:
    """Leave the world, if this process has joined one: after that it may join again."""
    global _joined, _left  # as above
    if _joined is not None and _joined.process_id == os.getpid():
        _joined.finish()
        _joined.leave()
        _joined, _left = None, True
        # The store that rank 0 serves closes with the last reference, and what has left refers to itself in circles.
        gc.collect()


def finish() -> None:
    """At the end of a script that did not fail: wait for what goes on in the background, and see whether other ranks
    still wait for this one. Raises what either of them finds.
    """
    if _joined is not None and _joined.process_id == os.getpid():
        _joined.finish()

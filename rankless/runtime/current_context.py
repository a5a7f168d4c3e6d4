"""The one `ProcessContext` of this process, and its rendezvous with the other ranks.

`rankless.api` reads both. The compatible APIs of other systems read the rendezvous.
"""

import gc
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from rankless.errors import JoinError
from rankless.plain_script.hide_ranks import make_refusal
from rankless.runtime.process_context import ProcessContext, RecordObserver, join
from rankless.runtime.rendezvous.find_rendezvous import RendezvousInfo, find_rendezvous_info
from rankless.runtime.rendezvous.init_address_and_rank import RendezvousParameters

if TYPE_CHECKING:
    from rankless.logical_view.tensor import LogicalView

_context: ProcessContext | None = None
_has_left = False
_rendezvous: RendezvousInfo | None = None


def current_rendezvous() -> RendezvousInfo:
    """Return rank, size and store of this process in its job. All calls return the same store.

    Raises:
        JoinError: This process finds no other ranks.
        ConfigError: The script runs in the logical view, in which it is alone.
    """
    require_ranks("a call that joins other ranks")
    global _rendezvous  # one of the pieces of state that the design allows a module
    if _rendezvous is None:
        _rendezvous = find_rendezvous_info()
    return _rendezvous


def current_context(*, make_observer: Callable[[], RecordObserver]) -> ProcessContext:
    """Return the context of this process. The first call joins the world.

    `make_observer` returns what receives the records of a process that was started without `rankless run`.
    """
    global _context  # one of the pieces of state that the design allows a module
    if _context is None or _context.process_id != os.getpid():
        _context = join(make_observer=make_observer, find_info=current_rendezvous, again=_has_left)
    return _context


def join_rendezvous(parameters: RendezvousParameters, *, make_observer: Callable[[], RecordObserver]) -> None:
    """Join where the script says. Raises JoinError if this process has joined already."""
    global _context  # as above
    if _context is not None and _context.process_id == os.getpid():
        raise JoinError(
            expected="rankless.init before anything that joins: calls of jobs, loaders, rankless.rank()",
            found="a process that has joined its job",
            fix="call it first in the script; to join another job, call rankless.shutdown() before it",
        )
    _context = join(make_observer=make_observer, find_info=current_rendezvous, parameters=parameters, again=_has_left)


def require_ranks(name: str) -> None:
    """Raise `ConfigError` for a use of something that needs ranks if the script runs in the logical view."""
    if find_view() is not None:
        raise make_refusal(name)


def find_view() -> "LogicalView | None":
    """Return the logical view in which the script runs, or None."""
    return None if _context is None or _context.process_id != os.getpid() else _context.logical


def join_line() -> str | None:
    """Return the line of the script at which this process has joined, or None if it has not joined."""
    return None if _context is None or _context.process_id != os.getpid() else _context.line


def leave() -> None:
    """Leave the world, if this process has joined one. Afterwards it may join again."""
    global _context, _has_left  # as above
    if _context is not None and _context.process_id == os.getpid():
        _context.finish()
        _context.leave()
        _context, _has_left = None, True
        # The store that rank 0 serves closes with the last reference, and the context contains reference cycles.
        gc.collect()


def finish() -> None:
    """Wait for background saves, at the end of a script that did not fail, and check for diverged ranks.

    Raises the error of a failed save, or `RanksDiverged` if other ranks still wait for this one.
    """
    if _context is not None and _context.process_id == os.getpid():
        _context.finish()

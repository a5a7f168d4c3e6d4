"""Run a collective after the check of the ranks' calls: at once, or, if it is asynchronous, when all ranks have called.

Note [deferred collectives]: a call with `async_op=True` returns before the other ranks have made theirs. It must not
be issued before, because a call that does not match would kill the process. So the call goes into a queue, and a thread
checks and issues it. If the other ranks have called already, and the queue is empty, the call is issued at once.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from rankless.collectives.call_signature import Call
from rankless.collectives.collective_check import CollectiveCheck
from rankless.errors import CollectiveError
from rankless.user_code import caller_line


class PendingWork(Protocol):
    """What an asynchronous collective returns."""

    def wait(self, timeout: timedelta = ...) -> Any:
        """Return when the result is there; raise the collective's error."""
        ...

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""
        ...


Issue = Callable[[bool], PendingWork | None]
"""Calls `torch.distributed`; the argument is its `async_op`."""


class CollectiveQueue:
    """The collectives of one group or channel, in the order in which this rank calls them.

    `open_check` makes the check at the first of them, and waits for the other ranks. It returns None if the ranks
    cannot compare their calls.
    """

    def __init__(self, open_check: Callable[[], CollectiveCheck | None], timeout: timedelta) -> None:
        self._open_check: Callable[[], CollectiveCheck | None] | None = open_check
        self._check: CollectiveCheck | None = None
        self._timeout = timeout
        self._waiting: deque[DeferredCollective] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def run(self, call: Call, issue: Issue, *, timeout: timedelta | None = None) -> None:
        """Check the ranks' calls, then run the collective to its end."""
        self._wait_until_empty()
        check = self.get_check()
        if check is not None:
            check.post(call, caller_line())
            check.wait_for_all(timeout or self._timeout)
            check.compare()
        issue(False)

    def start(self, call: Call, issue: Issue, *, timeout: timedelta | None = None) -> PendingWork:
        """Begin the collective when all ranks have made the call. The work's `wait` raises a mismatch."""
        deferred = DeferredCollective(call, caller_line(), issue, timeout or self._timeout)
        with self._changed:
            if not self._waiting and self._open_check is None and deferred.try_issue_now(self._check):
                return deferred
            self._waiting.append(deferred)
            if self._thread is None:
                self._thread = threading.Thread(target=self._issue_waiting, name="rankless collectives", daemon=True)
                self._thread.start()
            return deferred

    def refuse(self, operation: str, found: str) -> None:
        """Tell the ranks that wait for this rank's call that it cannot make it."""
        self._wait_until_empty()
        check = self.get_check()
        if check is not None:
            check.post(Call(operation=operation, settings=f"invalid arguments: {found}"), caller_line())
            check.wait_for_all(self._timeout)

    @property
    def is_open(self) -> bool:
        """Whether the check has been opened."""
        return self._open_check is None

    def get_check(self) -> CollectiveCheck | None:
        """Return the check, and open it first if necessary."""
        if self._open_check is not None:
            open_check, self._open_check = self._open_check, None
            try:
                self._check = open_check()
            except BaseException:
                self._open_check = open_check
                raise
        return self._check

    def _wait_until_empty(self) -> None:
        if self._waiting:
            with self._changed:
                self._changed.wait_for(lambda: not self._waiting)

    def _issue_waiting(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    return
                deferred = self._waiting[0]
            deferred.check_and_issue(self.get_check)
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()


class DeferredCollective:
    """A collective that is issued when all ranks have made the call."""

    def __init__(self, call: Call, line: str, issue: Issue, timeout: timedelta) -> None:
        self._call = call
        self._line = line
        self._issue = issue
        self._timeout = timeout
        self._posted = False
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        self._issued = threading.Event()
        self._work: PendingWork | None = None
        self._error: Exception | None = None
        self._done = False

    def try_issue_now(self, check: CollectiveCheck | None) -> bool:
        """Issue the collective if all ranks have called, or keep a mismatch for `wait`. Return whether either held."""
        if check is not None:
            self._post(check)
            if not check.all_posted():
                return False
            try:
                check.compare()
            except CollectiveError as error:
                # A rank that called earlier finds the error in `wait`, after its next calls: so must this one.
                self._error = error
        if self._error is None:
            self._work = self._issue(True)
        self._issued.set()
        return True

    def check_and_issue(self, get_check: Callable[[], CollectiveCheck | None]) -> None:
        """Wait for all ranks, compare their calls and issue the collective. Keep an error for `wait`."""
        try:
            check = get_check()
            if check is not None:
                self._post(check)
                check.wait_for_all(self._timeout)
                check.compare()
            with torch.cuda.stream(self._stream):
                self._work = self._issue(True)
        except Exception as error:  # any error belongs to the caller of `wait`
            self._error = error
        finally:
            self._issued.set()

    def _post(self, check: CollectiveCheck) -> None:
        if not self._posted:
            self._posted = True
            check.post(self._call, self._line)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the collective is done, or on a GPU is in the stream. Raises `CollectiveError` if it failed."""
        if not self._issued.wait(None if timeout is None else timeout.total_seconds()):
            raise CollectiveError(
                expected=f"all ranks to call {self._call}",
                found=f"not all of them did in {timeout}",
                fix="wait longer, or see what the other ranks do instead: py-spy dump --pid",
                where=self._line,
            )
        if self._error is not None:
            raise self._error
        if self._work is not None:
            self._work.wait() if timeout is None else self._work.wait(timeout)
        self._done = True
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        # Some of torch's works do not report completion even after `wait`.
        return self._done or (self._issued.is_set() and (self._work is None or self._work.is_completed()))


class CombinedWork:
    """A collective in several operations, with a function that puts the results in place afterwards."""

    def __init__(self, works: Sequence[PendingWork | None], finish: Callable[[], object]) -> None:
        self._works = [work for work in works if work is not None]
        self._finish: Callable[[], object] | None = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the results are in place."""
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        return True

    def is_completed(self) -> bool:
        """Return whether every operation is done; `wait` puts the results in place."""
        return all(work.is_completed() for work in self._works)


def combine_works(
    works: Sequence[PendingWork | None], finish: Callable[[], None], async_op: bool
) -> PendingWork | None:
    """Return several operations as one work if `async_op`; otherwise wait for them."""
    combined = CombinedWork(works, finish)
    if async_op:
        return combined
    combined.wait()
    return None

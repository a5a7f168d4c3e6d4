"""A collective after its roll call: at once, or, asynchronous, as soon as all ranks have come.

Note [issued late]: a call with `async_op=True` returns before the other ranks have come, but must not be issued before:
one that does not fit would kill the process. So the call goes into a queue, and a thread holds its roll call and issues
it. Where the others are there already, and nothing waits before it, it is issued at once, without the thread.
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
        """Return once the result is there; raise what went wrong."""
        ...

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        ...


Issue = Callable[[bool], PendingWork | None]
"""Calls torch.distributed, asynchronously if its argument says so."""


class CollectiveQueue:
    """The collectives of one roll call, in the order in which this rank calls them.

    `opening` makes the roll call at the first of them, and waits there for the other ranks; it gives None where nothing
    can be compared.
    """

    def __init__(self, open_check: Callable[[], CollectiveCheck | None], timeout: timedelta) -> None:
        self._open_check: Callable[[], CollectiveCheck | None] | None = open_check
        self._check: CollectiveCheck | None = None
        self._timeout = timeout
        self._waiting: deque[DeferredCollective] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def run(self, call: Call, issue: Issue, *, timeout: timedelta | None = None) -> None:
        """Hold the roll call, then run the collective to its end."""
        self._wait_until_empty()
        collective_check = self.get_check()
        if collective_check is not None:
            collective_check.write(call, caller_line())
            collective_check.wait(timeout or self._timeout)
            collective_check.compare()
        issue(False)

    def start(self, call: Call, issue: Issue, *, timeout: timedelta | None = None) -> PendingWork:
        """Begin the collective once the roll call is held; what does not fit is raised where it is awaited."""
        late = DeferredCollective(call, caller_line(), issue, timeout or self._timeout)
        with self._changed:
            if not self._waiting and self._open_check is None and late.try_issue_now(self._check):
                return late
            self._waiting.append(late)
            if self._thread is None:
                self._thread = threading.Thread(target=self._issue_waiting, name="rankless collectives", daemon=True)
                self._thread.start()
            return late

    def refuse(self, operation: str, found: str) -> None:
        """Tell the other ranks that this one cannot make its call, where they wait for it."""
        self._wait_until_empty()
        collective_check = self.get_check()
        if collective_check is not None:
            collective_check.write(Call(operation=operation, settings=f"refused there: {found}"), caller_line())
            collective_check.wait(self._timeout)

    @property
    def is_open(self) -> bool:
        """Whether the roll call has been opened."""
        return self._open_check is None

    def get_check(self) -> CollectiveCheck | None:
        """The roll call, opened if it is not yet."""
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
                late = self._waiting[0]
            late.check_and_issue(self.get_check)
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()


class DeferredCollective:
    """A collective that is issued when all ranks have come."""

    def __init__(self, call: Call, line: str, issue: Issue, timeout: timedelta) -> None:
        self._call = call
        self._line = line
        self._issue = issue
        self._timeout = timeout
        self._written = False
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        self._issued = threading.Event()
        self._work: PendingWork | None = None
        self._error: Exception | None = None
        self._done = False

    def try_issue_now(self, collective_check: CollectiveCheck | None) -> bool:
        """Issue it if all ranks have come, or keep for `wait` that it does not fit: whether either was so."""
        if collective_check is not None:
            self._write(collective_check)
            if not collective_check.all_posted():
                return False
            try:
                collective_check.compare()
            except CollectiveError as error:
                # A rank that came earlier learns of it in `wait`, and makes its next calls before: so must this one.
                self._error = error
        if self._error is None:
            self._work = self._issue(True)
        self._issued.set()
        return True

    def check_and_issue(self, get_check: Callable[[], CollectiveCheck | None]) -> None:
        """Hold the roll call and issue; what fails is kept for `wait`."""
        try:
            collective_check = get_check()
            if collective_check is not None:
                self._write(collective_check)
                collective_check.wait(self._timeout)
                collective_check.compare()
            with torch.cuda.stream(self._stream):
                self._work = self._issue(True)
        except Exception as error:  # whatever it is, it belongs to whoever waits
            self._error = error
        finally:
            self._issued.set()

    def _write(self, collective_check: CollectiveCheck) -> None:
        if not self._written:
            self._written = True
            collective_check.write(self._call, self._line)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return once the collective is done (on a GPU: is in the stream); raises CollectiveError if it cannot be."""
        if not self._issued.wait(None if timeout is None else timeout.total_seconds()):
            raise CollectiveError(
                expected=f"all ranks to come to {self._call}",
                found=f"not all of them in {timeout}",
                fix="wait longer, or look at what the others do instead: py-spy dump --pid",
                where=self._line,
            )
        if self._error is not None:
            raise self._error
        if self._work is not None:
            self._work.wait() if timeout is None else self._work.wait(timeout)
        self._done = True
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return or raise at once."""
        # Not every one of torch's works says so once it is.
        return self._done or (self._issued.is_set() and (self._work is None or self._work.is_completed()))


class CombinedWork:
    """A collective in pieces whose results are put where they belong once it is done."""

    def __init__(self, works: Sequence[PendingWork | None], finish: Callable[[], None]) -> None:
        self._works = [work for work in works if work is not None]
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return once the results are in place."""
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        return True

    def is_completed(self) -> bool:
        """Whether every piece has come; `wait` puts them in place."""
        return all(work.is_completed() for work in self._works)


def combine_works(works: Sequence[PendingWork | None], finish: Callable[[], None], late: bool) -> PendingWork | None:
    """A collective in pieces: to be waited for if it is issued late, else waited for now."""
    whole = CombinedWork(works, finish)
    if late:
        return whole
    whole.wait()
    return None

"""What ended a run: the data of a verdict, and the records that may lead to one.

`failure_attribution` makes verdicts. Only a run in which something fails loads it.
"""

from typing import Literal

import msgspec

from rankless.records.events import (
    PREEMPTED_EXIT_CODE,
    AnyRecord,
    Exited,
    GroupTeardown,
    HangDetected,
    HostInterrupted,
    HostLost,
    ProcessExited,
    Raised,
    ScriptFinished,
    Started,
)

ATTRIBUTED_RECORDS = (
    Started
    | Raised
    | GroupTeardown
    | ScriptFinished
    | Exited
    | ProcessExited
    | HostLost
    | HostInterrupted
    | HangDetected
)
"""The records that affect a verdict. A long job has too many others to keep them."""

EXPLAINED_SETTLING_SECONDS = 0.05

Cause = Literal["raised", "left", "signal", "exit", "lost", "timeout", "host", "interrupted", "hang", "stalled"]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The rank or other process that caused the end of the job, what happened to it, and the job's exit code."""

    root_cause_rank: int
    """If a whole host is the root cause, its first rank; NO_RANK if another process is, or a host without ranks."""
    root_cause_host: str = ""
    """The name of the host, if a whole host is the root cause."""
    root_cause_number: int | None = None
    """The number of the process beside the workers that is the root cause, if one is."""
    role: str = ""
    """What that process is called; "" if a rank or a host is the root cause."""
    cause: Cause
    exit_code: int
    headline: str
    line: str = ""
    """The script's line of an exception, like "train.py:33"."""
    traceback: str = ""
    settling_seconds: float = EXPLAINED_SETTLING_SECONDS
    """How long to wait for a record that changes the verdict."""

    @property
    def root_cause(self) -> str:
        """The root cause's name, as "rank 1" or "server 0"."""
        number = self.root_cause_number
        return f"rank {self.root_cause_rank}" if number is None else f"{self.role} {number}"


class WorkerEnds:
    """Whether the workers of all hosts have ended by themselves, although somebody had asked them to stop.

    Those that the others continue without are left out.
    """

    def __init__(self) -> None:
        self._exit_codes: dict[int, int] = {}
        self._complete: set[int] = set()

    def receive(self, record: AnyRecord) -> None:
        """Take note of the end of a worker."""
        if isinstance(record, ScriptFinished) and record.is_complete:
            self._complete.add(record.rank)
        elif isinstance(record, Exited) and record.survivors is None:
            self._exit_codes[record.rank] = record.exit_code

    @property
    def are_preempted(self) -> bool:
        """Whether all have ended to be started again later."""
        return set(self._exit_codes.values()) == {PREEMPTED_EXIT_CODE}

    @property
    def are_complete(self) -> bool:
        """Whether all have reached the end of a script that heeds requests to stop."""
        return set(self._exit_codes.values()) == {0} and self._complete >= self._exit_codes.keys()


class SecondaryFailure(msgspec.Struct, frozen=True):
    """A rank that failed after another one, and what happened to it, like "lost its connection to another rank"."""

    rank: int
    text: str


def may_be_failure(record: AnyRecord) -> bool:
    """Whether a record may be a failure, or the effect of one. Without such a record there is no verdict."""
    if isinstance(record, ScriptFinished | Exited):
        return record.exit_code != 0
    return isinstance(record, Raised | ProcessExited | HostLost | HostInterrupted | HangDetected)

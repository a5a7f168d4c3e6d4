"""The records, one struct each, as one tagged union.

Times are `time.monotonic_ns()` of the host, which all processes of one host share.
"""

from typing import Literal

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What every record has: the rank it is about and when it happened."""

    rank: int
    time_ns: int


class Started(Record, frozen=True, tag="started"):
    """A worker exists."""

    pid: int
    log_file: str


class Raised(Record, frozen=True, tag="raised"):
    """An exception reached the top of a worker's script. Sent before anything is cleaned up."""

    error_type: str
    message: str
    traceback: str


class GroupTeardown(Record, frozen=True, tag="group_teardown"):
    """A worker's script destroys its process groups and goes on: peers may now lose their connection.

    The texts are those of the exception that is on its way, as in a `finally`; empty without one.
    """

    error_type: str = ""
    message: str = ""
    traceback: str = ""


class ScriptFinished(Record, frozen=True, tag="script_finished"):
    """A worker's script is over, to exit with `exit_code`. Sent before its groups are destroyed."""

    exit_code: int


class Exited(Record, frozen=True, tag="exited"):
    """A worker's process has ended. `exit_code` is negative for a signal, as in `subprocess`."""

    exit_code: int


class Progress(Record, frozen=True, tag="progress"):
    """Where a training loop is."""

    job: str
    epoch: int
    step: int
    """Steps done in this epoch, from 1."""
    steps_per_epoch: int | None
    loss: float | None
    samples_per_second: float
    seconds_left: float | None
    """Until the end of the epoch."""
    last_of_epoch: bool = False


class Notice(Record, frozen=True, tag="notice"):
    """A notice for the user (an operator gathered for lack of a rule, say), meant to be shown once."""

    text: str


class FileOpened(Record, frozen=True, tag="file_opened"):
    """A worker's script writes a file: sent once for each file."""

    path: str
    """Absolute."""
    line: str
    """File and line of the script, as "train.py:40"; empty if it is not known."""


class HostLost(Record, frozen=True, tag="host_lost"):
    """A host of the job is gone, or silent; `rank` is its first."""

    host: str
    how: str


class HostInterrupted(Record, frozen=True, tag="host_interrupted"):
    """A signal has told another host's agent to end; `rank` is its first."""

    host: str
    signal: int


RankState = Literal["moves", "waits", "computes", "blocked", "stopped", "debugged", "ended"]
"""`waits`: in a collective, for other ranks. `blocked`: elsewhere, and nothing of it runs. `debugged`: at a breakpoint,
or held by a debugger. `moves`: what was told of it before is over.
"""


class RankStatus(Record, frozen=True, tag="rank_status"):
    """Where a rank is, told by its host's agent when some rank there has stood still for long, or host 0 asks."""

    state: RankState
    still_seconds: float = 0.0
    """For how long its main thread has not run."""
    quiet_seconds: float = 0.0
    """For how long it has written no output."""
    cpu_percent: float = 0.0
    doing: str = ""
    """What it waits in, as "all_reduce"; or how it stands still, as "sleeps"."""
    line: str = ""
    """The innermost line of the script, as "train.py:33"."""
    text: str = ""
    """Where that is, in words, as "load() at data.py:12, called from train.py:20"."""
    stack: tuple[str, ...] = ()
    """The script's frames, outermost first."""
    asked: bool = False
    """Told because host 0 has asked: no news of its own."""


class HangDetected(Record, frozen=True, tag="hang_detected"):
    """The job is to be ended, because this rank does not come to where others wait for it."""

    headline: str
    traceback: str


AnyRecord = (
    Started
    | Raised
    | GroupTeardown
    | ScriptFinished
    | Exited
    | Progress
    | Notice
    | FileOpened
    | HostLost
    | HostInterrupted
    | RankStatus
    | HangDetected
)

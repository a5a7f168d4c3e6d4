"""The records that workers, fork servers and agents send, as one tagged union.

Times are `time.monotonic_ns()` of the host, which all processes of one host share.

Note [one socket]: all processes of a host send records as single messages on one socket, so that messages of several
processes keep the order in which they were sent. That order decides which rank the agent finds to be the root cause of
a failure.
"""

import contextlib
import socket
from typing import Literal

import msgspec

from rankless.records.encoding import encode_bounded_msgpack
from rankless.records.number_formatting import format_seconds

NO_RANK = -1
"""The rank of records that are about no rank."""


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """The fields of every record: the rank that it is about, and the time of the event."""

    rank: int
    time_ns: int


class Started(Record, frozen=True, tag="started"):
    """A worker process has started."""

    pid: int
    log_file: str


class Raised(Record, frozen=True, tag="raised"):
    """An exception has reached the top of a worker's script. The worker sends it before any clean-up."""

    error_type: str
    message: str
    traceback: str
    cause: str = ""
    """The type and the first line of the exception that is the cause, which may be wrapped in this one."""
    line: str = ""
    """The innermost line of the script, like "/home/me/train.py:33"."""
    output_start: int | None = None
    """The size of the worker's log file before it gets the traceback; None if the traceback goes elsewhere."""


class GroupTeardown(Record, frozen=True, tag="group_teardown"):
    """A worker's script destroys its process groups and continues, so its peers may lose their connections.

    The texts are those of the exception in flight, for example inside a `finally`, and empty without one.
    """

    error_type: str = ""
    message: str = ""
    traceback: str = ""
    cause: str = ""
    line: str = ""


PREEMPTED_EXIT_CODE = 75
"""Of a worker, and of a run, that ends because it was asked to, and continues once it is started again: EX_TEMPFAIL."""


class ScriptFinished(Record, frozen=True, tag="script_finished"):
    """A worker's script has ended, with `exit_code`. The worker sends it before it destroys its process groups."""

    exit_code: int
    output_end: int | None = None
    """After an exception: the size of the worker's log file with the traceback."""
    peak_gpu_memory_bytes: int | None = None
    """The most that PyTorch has allocated on the GPU; None if the script used none."""
    is_complete: bool = False
    """Whether the script has reached its end although it heeds requests to stop, so there is nothing left to do."""


class Exited(Record, frozen=True, tag="exited"):
    """A worker's process has ended. `exit_code` is negative for a signal, as in `subprocess`."""

    exit_code: int
    peak_memory_bytes: int | None = None
    """The largest resident set of the process, or of one of its children."""
    survivors: int | None = None
    """How many workers continue without it, which the agent adds; None: its end is no loss of a worker."""


class ProcessExited(Record, frozen=True, tag="process_exited"):
    """A process beside the workers has ended while workers ran.

    The agent makes it; its rank is NO_RANK.
    """

    role: str
    """What the process is called; its number follows."""
    number: int
    exit_code: int
    """Negative for a signal, as in `subprocess`."""
    is_restarted: bool = False
    """Whether the agent has started it again."""
    note: str = ""
    """Why it was not started again, to follow "was killed by signal 9 (SIGKILL)"; "" without a reason."""
    is_covered: bool = False
    """Whether the run continues without it, because another process has what it had. Host 0 adds it."""


class ProcessLost(Record, frozen=True, tag="process_lost"):
    """The run continues without a process beside the workers, because another one has the same. Host 0 makes it."""

    role: str
    """What the process is called; its number follows."""
    number: int


class ProcessRestarted(Record, frozen=True, tag="process_restarted"):
    """A process beside the workers that has died serves again. The agent makes it; its rank is NO_RANK."""

    role: str
    """What the process is called; its number follows."""
    number: int
    text: str
    """A line for the user, like "server 1 was killed by SIGKILL; started again in 0.2 s"."""


ProcessState = Literal["runs", "stopped", "debugged"]
"""stopped: by a signal. debugged: a debugger has stopped it."""


class ProcessObserved(Record, frozen=True, tag="process_observed"):
    """What a process beside the workers does. Its host's agent makes it if host 0 asks; its rank is NO_RANK."""

    role: str
    """What the process is called; its number follows."""
    number: int
    doing: str
    """To follow "server 1", like "is idle (0 % CPU)"."""
    state: ProcessState = "runs"
    is_busy: bool = False
    """Whether it computes, and so makes progress."""


class Progress(Record, frozen=True, tag="progress"):
    """The progress of a training loop."""

    job: str
    epoch: int
    step: int
    """Number of steps made in this epoch."""
    steps_per_epoch: int | None
    loss: float | None
    samples_per_second: float
    seconds_left: float | None
    """The time until the end of the epoch."""
    last_of_epoch: bool = False


class Notice(Record, frozen=True, tag="notice"):
    """A text for the user, shown once. Example: an operator without a sharding rule runs replicated."""

    text: str


class CheckpointLoaded(Record, frozen=True, tag="checkpoint_loaded"):
    """A worker has loaded one of `rankless.checkpoints`."""

    step: int


class StopsHeeded(Record, frozen=True, tag="stops_heeded"):
    """The script asks whether it shall stop, so SIGTERM does not end it: it saves and ends by itself."""


class FileOpened(Record, frozen=True, tag="file_opened"):
    """A worker's script opens a file to write it. The worker sends one record for each file."""

    path: str
    """The absolute path."""
    line: str
    """File and line of the script, like "train.py:40", or empty if unknown."""


class HostLost(Record, frozen=True, tag="host_lost"):
    """A host of the job is gone or silent. `rank` is the first rank of that host, NO_RANK if it has no workers."""

    host: str
    how: str
    host_index: int | None = None
    is_covered: bool = False
    """Whether the run continues without the host. Host 0 adds it."""
    are_processes_covered: bool = False
    """Whether other hosts have what the host's processes beside its workers had. Host 0 adds it."""


class HostInterrupted(Record, frozen=True, tag="host_interrupted"):
    """A signal has ended the agent of another host. `rank` is the first rank of that host, or NO_RANK."""

    host: str
    signal: int


RankState = Literal["moves", "waits", "computes", "blocked", "stopped", "debugged", "ended"]
"""The state of a rank's main thread.

"waits": in a collective, for other ranks. "blocked": elsewhere, and none of its threads runs. "debugged": at a
breakpoint, or stopped by a debugger. "moves": its previous state has ended.
"""


class WorkerCut(Record, frozen=True, tag="worker_cut"):
    """A worker is killed, because it has not ended in the time that it had after a signal from outside the run."""

    after_seconds: float
    """How long after the signal."""
    doing: str = ""
    """The line of the script in which it was a second before at most, like "save() at train.py:12"; "" if unknown."""


class RankStatus(Record, frozen=True, tag="rank_status"):
    """What a rank does and where. Its host's agent sends it if a rank there is idle for long, or if host 0 asks."""

    state: RankState
    idle_seconds: float = 0.0
    """How long its main thread has not run."""
    silent_seconds: float = 0.0
    """How long it has written no output."""
    cpu_percent: float = 0.0
    doing: str = ""
    """The collective in which it waits, like "all_reduce", or how it is idle, like "sleeps"."""
    line: str = ""
    """The innermost line of the script, like "train.py:33"."""
    text: str = ""
    """A description of that line, like "load() at data.py:12, called from train.py:20"."""
    stack: tuple[str, ...] = ()
    """The script's frames, outermost first."""
    connecting_to: str = ""
    """The address and port to which a rank that waits tries to connect without an answer."""
    is_rendezvous: bool = False
    """Whether it waits for the other ranks to join a group or a store."""
    phase: str = "script"
    """Its phase: a name in `launch.watchdog.phase_timeouts`."""
    requested: bool = False
    """Whether it only answers a request of host 0."""


class HangDetected(Record, frozen=True, tag="hang_detected"):
    """The agent must end the job: this rank does not reach the collective in which others wait for it."""

    headline: str
    traceback: str
    number: int | None = None
    """The number of the process beside the workers for which they wait, if it is one; the rank is NO_RANK then."""
    role: str = ""
    """What that process is called; "" if they wait for a rank."""


class StepTimes(Record, frozen=True, tag="step_times"):
    """How long the last steps of a rank have taken. Its host's agent sends it every few seconds."""

    step_seconds: float
    own_seconds: float
    """Without the time in collectives, in which a rank waits for slower ones."""
    period_seconds: float
    """Over which the steps were measured."""


class SlowRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank for which the others wait in each step."""

    rank: int
    since: str
    """The time of the day, like "15:02:10 UTC"."""
    own_seconds: float
    """What its part of a step takes: all but collectives."""
    usual_seconds: float
    """The same of other ranks."""

    @property
    def text(self) -> str:
        """What the user reads."""
        own, usual = format_seconds(self.own_seconds), format_seconds(self.usual_seconds)
        times = f", {self.own_seconds / self.usual_seconds:.1f} times as long as" if self.usual_seconds else ", and"
        return (
            f"rank {self.rank} is slow since {self.since}: its part of a step takes {own}{times} {usual} on other "
            "ranks, which wait for it"
        )


class SlowRankChanged(Record, frozen=True, tag="slow_rank_changed"):
    """A rank is slow, or no longer slow. Host 0's agent sends it."""

    slow: SlowRank
    is_over: bool = False


AnyRecord = (
    Started
    | Raised
    | GroupTeardown
    | ScriptFinished
    | Exited
    | ProcessExited
    | ProcessRestarted
    | ProcessLost
    | ProcessObserved
    | Progress
    | Notice
    | CheckpointLoaded
    | StopsHeeded
    | FileOpened
    | HostLost
    | HostInterrupted
    | WorkerCut
    | RankStatus
    | HangDetected
    | StepTimes
    | SlowRankChanged
)


# With sequenced packets the reader also sees when the last writer is gone. macOS has datagrams only.
_KIND = getattr(socket, "SOCK_SEQPACKET", None) if hasattr(socket, "SO_PASSCRED") else None
_MAX_RECORD_BYTES = 128 * 1024
"""Neither end has room for a message of any length. The texts of a longer record lose their middles."""


def open_channel() -> tuple[socket.socket, socket.socket]:
    """Open a channel, and return the reader's and the writers' end."""
    reader, writer = socket.socketpair(socket.AF_UNIX, _KIND or socket.SOCK_DGRAM)
    for end in (reader, writer):
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            end.setsockopt(socket.SOL_SOCKET, option, 4 * _MAX_RECORD_BYTES)
    return reader, writer


def send_record(record: AnyRecord, *, descriptor: int, blocking: bool = True) -> None:
    """Send one record. Drops it if the reader is gone, and without `blocking` also if the reader lags."""
    data = encode_bounded_msgpack(record, max_bytes=_MAX_RECORD_BYTES)
    flags = 0 if blocking else socket.MSG_DONTWAIT
    with contextlib.suppress(OSError), socket.socket(fileno=descriptor) as writer:
        try:
            writer.send(data, flags)
        finally:
            writer.detach()


def receive_records(reader: socket.socket) -> tuple[list[AnyRecord], bool]:
    """Return all records that wait on a non-blocking `reader`, and whether the last writer is gone."""
    records: list[AnyRecord] = []
    while True:
        try:
            data = reader.recv(2 * _MAX_RECORD_BYTES)
        except BlockingIOError:
            return records, False
        except ConnectionError:
            return records, True
        if not data:
            return records, True
        with contextlib.suppress(msgspec.MsgspecError):  # a process of the user may write anything to the descriptor
            records.append(msgspec.msgpack.decode(data, type=AnyRecord))

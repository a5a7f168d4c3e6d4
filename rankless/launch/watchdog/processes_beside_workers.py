"""The state of the processes of a run beside its workers: one that is stopped holds up every worker.

That of this host's processes is read from `/proc`. Host 0 learns that of the others from their agents' records.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from rankless.launch.watchdog.process_activity import ActivityTracker
from rankless.records.events import (
    NO_RANK,
    AnyRecord,
    ProcessExited,
    ProcessLost,
    ProcessObserved,
    ProcessRestarted,
    ProcessState,
)
from rankless.records.live_run import ProcessRow
from rankless.records.server_traffic_counters import ServerActivity
from rankless.records.shared_record import read_record

_IDLE_SECONDS = 1.5
Name = tuple[str, int]
"""What a process is called, and its number."""
_RESTARTING = "is being started again"


@dataclass(frozen=True, kw_only=True)
class ProcessStatus:
    """What a process beside the workers does."""

    role: str
    index: int
    doing: str
    """To follow "server 1", like "is idle (0 % CPU)"."""
    state: ProcessState = "runs"
    host: str = ""
    """The name of its host, if there are several."""
    is_busy: bool = False
    """Whether it computes: then ranks that wait for it wait for an answer that is on its way."""

    @property
    def name(self) -> str:
        """The process, like "server 1", or "server 1 on 10.0.0.2"."""
        return f"{self.role} {self.index} on {self.host}" if self.host else f"{self.role} {self.index}"

    @property
    def holds_up(self) -> bool:
        """Whether workers wait for it in vain."""
        return self.state != "runs"


class ProcessMonitor:
    """The processes of this host beside its workers, and on host 0 those of the others.

    Args:
        list_rows: Returns those of this host once they have started.
        host_name: Returns the name of a process's host, by its role and number; "" if there is one host only.
    """

    def __init__(
        self,
        list_rows: Callable[[], Sequence[ProcessRow]],
        host_name: Callable[[Name], str] = lambda _name: "",
    ) -> None:
        self._list_rows = list_rows
        self._host_name = host_name
        self._trackers: dict[Name, ActivityTracker] = {}
        self._pages: dict[Name, int | None] = {}
        self._restarting: set[Name] = set()
        self._remote: dict[Name, ProcessStatus] = {}
        self._remote_restarting: set[Name] = set()
        self._interrupted_at = float("-inf")

    def receive(self, record: AnyRecord, now: float) -> None:
        """Take note of a record about a process of another host."""
        if isinstance(record, ProcessLost):  # also one of this host, whose copy continues
            self._remote.pop((record.role, record.number), None)
            self._remote_restarting.discard((record.role, record.number))
            self._interrupted_at = now
        if not isinstance(record, ProcessExited | ProcessRestarted | ProcessObserved):
            return
        name = (record.role, record.number)
        if name in {row.name for row in self._list_rows()}:
            return
        if isinstance(record, ProcessObserved):
            self._remote[name] = ProcessStatus(
                role=record.role, index=record.number, doing=record.doing, state=record.state, is_busy=record.is_busy
            )
        else:
            self._interrupted_at = now
            self._remote_restarting.discard(name)
            if isinstance(record, ProcessExited) and record.is_restarted:
                self._remote_restarting.add(name)

    def update(self, now: float) -> None:
        """Read the counters of each process."""
        rows = self._list_rows()
        self._restarting = {row.name for row in rows if row.is_restarting}
        self._pages = {row.name: row.status_descriptor for row in rows}
        for row in rows:
            tracker = self._trackers.get(row.name)
            if tracker is None or tracker.process_id != row.process_id:
                if tracker is not None:
                    self._interrupted_at = now
                tracker = self._trackers[row.name] = ActivityTracker(row.process_id, now)
            tracker.update(now)
        if self.is_restarting:
            self._interrupted_at = now

    @property
    def is_restarting(self) -> bool:
        """Whether workers may wait for a process that is being started again."""
        return bool(self._restarting or self._remote_restarting)

    def seconds_since_restart(self, now: float) -> float:
        """Return for how long all processes have served: 0 while one is started again, infinity if none ever was."""
        return now - self._interrupted_at

    def seconds_since_activity(self, now: float) -> float:
        """Return for how long no process of this host has computed or moved data; infinity without processes.

        A process may compile, or apply a large gradient on a loaded machine, while all ranks wait for it.
        """
        return min((now - tracker.tree_idle_since for tracker in self._trackers.values()), default=float("inf"))

    def list_statuses(self, now: float) -> list[ProcessStatus]:
        """Return what each process does; those that hold up the job come first."""
        restarting = [ProcessStatus(role=name[0], index=name[1], doing=_RESTARTING) for name in self._remote_restarting]
        remote = [each for name, each in self._remote.items() if name not in self._remote_restarting]
        found = [*self._list_own(now), *remote, *restarting]
        named = [replace(each, host=self._host_name((each.role, each.index))) for each in found]
        return sorted(named, key=lambda status: (not status.holds_up, status.role, status.index))

    def make_records(self, now: float) -> Iterator[ProcessObserved]:
        """Yield for host 0 what each process of this host does."""
        for each in self._list_own(now):
            yield ProcessObserved(
                rank=NO_RANK,
                time_ns=time.monotonic_ns(),
                role=each.role,
                number=each.index,
                doing=each.doing,
                state=each.state,
                is_busy=each.is_busy,
            )

    def _list_own(self, now: float) -> list[ProcessStatus]:
        return [
            ProcessStatus(role=name[0], index=name[1], doing=_RESTARTING)
            if name in self._restarting
            else _describe(name, tracker, self._pages.get(name), now)
            for name, tracker in self._trackers.items()
        ]


def _describe(name: Name, tracker: ActivityTracker, page: int | None, now: float) -> ProcessStatus:
    stats, (role, index) = tracker.stats, name
    if stats is None or stats.state in "ZX":
        return ProcessStatus(role=role, index=index, doing="has ended")
    if stats.tracer_pid or stats.state == "t":
        doing = f"does not answer: its process {tracker.process_id} is in a debugger"
        return ProcessStatus(role=role, index=index, doing=doing, state="debugged")
    if stats.state == "T":
        doing = f"does not answer: it is stopped by a signal (kill -CONT {tracker.process_id} resumes it)"
        return ProcessStatus(role=role, index=index, doing=doing, state="stopped")
    how = "is idle" if now - tracker.tree_idle_since > _IDLE_SECONDS else "computes"
    how = "waits for a disk" if stats.state == "D" else how
    doing = f"{how} ({tracker.cpu_percent:.0f} % CPU{_describe_work(page)})"
    return ProcessStatus(role=role, index=index, doing=doing, is_busy=how == "computes")


def _describe_work(page: int | None) -> str:
    """Say what a process has done, and which workers' steps it has not committed yet; "" if it publishes nothing."""
    record = None if page is None else read_record(page)
    if record is None:
        return ""
    try:
        activity = msgspec.json.decode(record.data, type=ServerActivity)
    except msgspec.DecodeError:
        return ""
    ahead = [f"{count} of worker {worker}" for worker, count in enumerate(activity.transactions_ahead) if count]
    more = f", steps that wait: {', '.join(ahead)}" if ahead else ""
    return f", requests done: {activity.requests}, steps committed: {activity.transactions}{more}"

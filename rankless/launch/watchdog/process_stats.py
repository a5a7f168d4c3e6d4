"""What the kernel tells of a process without disturbing it: whether it runs, and for how long it has stood still.

# Note [standing still]: the main thread of a rank that waits for others is not scheduled at all, as long as it waits.
# So "it has waited for 30 s" needs no word from the script: its count of context switches and the process's CPU time
# stand still. Whoever computes, moves data or polls a file often does not stand still by this measure.
"""

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

MAX_SWITCHES_PER_SECOND = 25.0
"""Of the main thread, while it stands still: a wait that looks now and then whether the others live is one, too."""
MAX_IDLE_CPU_FRACTION = 0.03
"""Of one core, likewise."""
MAX_UPDATE_GAP_SECONDS = 5.0
"""Between two looks: after a longer one (this process was stopped, or starved) nothing is known of the time between."""
CPU_WINDOW_SECONDS = 2.0
_TICK = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ProcessStats:
    """A process at one moment."""

    state: str
    """The main thread's, one letter as `ps` shows it."""
    cpu_seconds: float
    """All threads', and those of children that have ended."""
    context_switches: int
    """How often the main thread has gone to sleep."""
    tracer_pid: int
    """The debugger's process, or 0."""
    caught_signals: int
    """The signals that it has handlers for, as a set of bits."""


def read_process_stats(process_id: int) -> ProcessStats | None:
    """The process now; None if it is gone, or this is no Linux."""
    try:
        with open(f"/proc/{process_id}/stat", "rb") as file:
            stat = file.read().rpartition(b")")[2].split()
        with open(f"/proc/{process_id}/status", "rb") as file:
            status = dict(line.split(b":", 1) for line in file if b":" in line)
        return ProcessStats(
            state=stat[0].decode(),
            cpu_seconds=sum(map(int, stat[11:15])) * _TICK,
            context_switches=int(status[b"voluntary_ctxt_switches"]),
            tracer_pid=int(status[b"TracerPid"]),
            caught_signals=int(status[b"SigCgt"], 16),
        )
    except (OSError, KeyError, IndexError, ValueError):
        return None


def iterate_descendants(process_id: int) -> Iterator[int]:
    """Its children, their children, and so on."""
    try:
        threads = os.listdir(f"/proc/{process_id}/task")
    except OSError:
        return
    for thread in threads:
        try:
            with open(f"/proc/{process_id}/task/{thread}/children", "rb") as file:
                children = [int(child) for child in file.read().split()]
        except OSError:
            continue
        for child in children:
            yield child
            yield from iterate_descendants(child)


def describe_wait(process_id: int) -> str:
    """In which way its main thread sleeps, as far as the kernel says, or ""."""
    try:
        with open(f"/proc/{process_id}/wchan", encoding="ascii") as file:
            wait_channel = file.read()
    except OSError:
        return ""
    kinds = {
        "nanosleep": "sleeps",
        "futex": "waits for a lock or a thread",
        "flock": "waits for a file's lock",
        "do_wait": "waits for a process",
        "pipe": "waits for data",
        "poll": "waits for data",
        "select": "waits for data",
        "skb": "waits for data",
        "sk_": "waits for data",
        "unix_": "waits for data",
        "accept": "waits for a connection",
    }
    return next((text for part, text in kinds.items() if part in wait_channel), "")


class ActivityTracker:
    """One worker, looked at about every second."""

    def __init__(self, process_id: int, now: float) -> None:
        self.process_id = process_id
        self.stats = read_process_stats(process_id)
        self.idle_since = now
        """Since when neither its main thread nor the process has done anything to speak of."""
        self.tree_idle_since = now
        """Since when that holds for the processes that it has started, too."""
        self._updated_at = now
        self._tree: dict[int, float] = {}
        self._cpu: deque[tuple[float, float]] = deque()

    def update(self, now: float) -> None:
        """Look once more."""
        before, seconds = self.stats, now - self._updated_at
        self.stats, self._updated_at = read_process_stats(self.process_id), now
        if self.stats is None or before is None:
            return
        cpu = self.stats.cpu_seconds - before.cpu_seconds
        context_switches = self.stats.context_switches - before.context_switches
        moved = (
            cpu > MAX_IDLE_CPU_FRACTION * seconds + 1.5 * _TICK
            or context_switches > MAX_SWITCHES_PER_SECOND * seconds + 2
        )
        if moved or seconds > MAX_UPDATE_GAP_SECONDS or self.stats.state == "R":
            self.idle_since = now
        self._update_tree(now, seconds)

    def _update_tree(self, now: float, seconds: float) -> None:
        if self.idle_since == now:  # then its children do not matter
            self._tree, cpu = {}, 0.0
        else:
            before, self._tree = self._tree, {}
            for child in iterate_descendants(self.process_id):
                stats = read_process_stats(child)
                if stats is not None:
                    self._tree[child] = stats.cpu_seconds
            cpu = sum(cpu - before.get(child, cpu) for child, cpu in self._tree.items())
        if self.idle_since == now or cpu > MAX_IDLE_CPU_FRACTION * seconds + 1.5 * _TICK:
            self.tree_idle_since = now
        own = self.stats.cpu_seconds if self.stats is not None else 0.0
        self._cpu.append((now, own + sum(self._tree.values())))
        while len(self._cpu) > 2 and self._cpu[1][0] < now - CPU_WINDOW_SECONDS:
            self._cpu.popleft()

    @property
    def cpu_percent(self) -> float:
        """Of one core, over the last seconds; its children's counts while it waits for them."""
        (start, cpu_before), (end, cpu) = self._cpu[0], self._cpu[-1]
        return max(0.0, 100.0 * (cpu - cpu_before) / (end - start)) if end > start else 0.0

    @property
    def children(self) -> list[int]:
        """The processes that it has started, and theirs, as they were when it stood still."""
        return list(self._tree)

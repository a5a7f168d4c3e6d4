"""What the kernel tells of a process without disturbing it: whether it runs, and for how long it has stood still.

# Note [standing still]: the main thread of a rank that waits for others is not scheduled at all, as long as it waits.
# So "it has waited for 30 s" needs no word from the script: its count of context switches and the process's CPU time
# stand still. Whoever computes, moves data or polls a file often does not stand still by this measure.
"""

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

MOST_SWITCHES_PER_SECOND = 25.0
"""Of the main thread, while it stands still: a wait that looks now and then whether the others live is one, too."""
MOST_CPU = 0.03
"""Of one core, likewise."""
LONGEST_GAP_SECONDS = 5.0
"""Between two looks: after a longer one (this process was stopped, or starved) nothing is known of the time between."""
CPU_WINDOW_SECONDS = 2.0
_TICK = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Vitals:
    """A process at one moment."""

    state: str
    """The main thread's, one letter as `ps` shows it."""
    cpu_seconds: float
    """All threads', and those of children that have ended."""
    switches: int
    """How often the main thread has gone to sleep."""
    tracer: int
    """The debugger's process, or 0."""
    catches: int
    """The signals that it has handlers for, as a set of bits."""


def vitals_of(process_id: int) -> Vitals | None:
    """The process now; None if it is gone, or this is no Linux."""
    try:
        with open(f"/proc/{process_id}/stat", "rb") as file:
            stat = file.read().rpartition(b")")[2].split()
        with open(f"/proc/{process_id}/status", "rb") as file:
            status = dict(line.split(b":", 1) for line in file if b":" in line)
        return Vitals(
            state=stat[0].decode(),
            cpu_seconds=sum(map(int, stat[11:15])) * _TICK,
            switches=int(status[b"voluntary_ctxt_switches"]),
            tracer=int(status[b"TracerPid"]),
            catches=int(status[b"SigCgt"], 16),
        )
    except (OSError, KeyError, IndexError, ValueError):
        return None


def descendants_of(process_id: int) -> Iterator[int]:
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
            yield from descendants_of(child)


def waits_for(process_id: int) -> str:
    """In which way its main thread sleeps, as far as the kernel says, or ""."""
    try:
        with open(f"/proc/{process_id}/wchan", encoding="ascii") as file:
            place = file.read()
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
    return next((text for part, text in kinds.items() if part in place), "")


class Pulse:
    """One worker, looked at about every second."""

    def __init__(self, process_id: int, now: float) -> None:
        self.process_id = process_id
        self.vitals = vitals_of(process_id)
        self.still_since = now
        """Since when neither its main thread nor the process has done anything to speak of."""
        self.tree_still_since = now
        """Since when that holds for the processes that it has started, too."""
        self._felt_at = now
        self._tree: dict[int, float] = {}
        self._cpu: deque[tuple[float, float]] = deque()

    def feel(self, now: float) -> None:
        """Look once more."""
        before, seconds = self.vitals, now - self._felt_at
        self.vitals, self._felt_at = vitals_of(self.process_id), now
        if self.vitals is None or before is None:
            return
        cpu = self.vitals.cpu_seconds - before.cpu_seconds
        switches = self.vitals.switches - before.switches
        moved = cpu > MOST_CPU * seconds + 1.5 * _TICK or switches > MOST_SWITCHES_PER_SECOND * seconds + 2
        if moved or seconds > LONGEST_GAP_SECONDS or self.vitals.state == "R":
            self.still_since = now
        self._feel_tree(now, seconds)

    def _feel_tree(self, now: float, seconds: float) -> None:
        if self.still_since == now:  # then its children do not matter
            self._tree, cpu = {}, 0.0
        else:
            before, self._tree = self._tree, {}
            for child in descendants_of(self.process_id):
                vitals = vitals_of(child)
                if vitals is not None:
                    self._tree[child] = vitals.cpu_seconds
            cpu = sum(cpu - before.get(child, cpu) for child, cpu in self._tree.items())
        if self.still_since == now or cpu > MOST_CPU * seconds + 1.5 * _TICK:
            self.tree_still_since = now
        own = self.vitals.cpu_seconds if self.vitals is not None else 0.0
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

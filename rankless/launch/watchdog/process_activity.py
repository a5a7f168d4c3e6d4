"""Read from `/proc` whether a process runs and how long it has been idle, without disturbing it.

Note [idle processes]: the kernel does not schedule the main thread of a rank while the rank waits for others. So the
main thread's context switches and the process's CPU time do not grow. A process that computes, moves data or polls a
file often is not idle by this measure. The script need not cooperate. A process that does not wait for other ranks may
still have work that takes little CPU time, such as a slow download: it is idle only if it and its child processes also
move hardly any bytes.
"""

import contextlib
import os
import socket
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

MAX_SWITCHES_PER_SECOND = 25.0
"""Context switches of an idle main thread: a wait that polls now and then counts as idle."""
MAX_IDLE_CPU_FRACTION = 0.03
"""CPU time of an idle process, as a fraction of one core."""
MAX_QUIET_CPU_FRACTION = 0.1
"""CPU time of a process that polls, as a fraction of one core.

See Note [rendezvous polls] in `worker_idleness_and_location`.
"""
MAX_IDLE_BYTES_PER_SECOND = 4096.0
"""Bytes that an idle process and its children read and write. Logs and polls of files stay below it."""
MAX_UPDATE_GAP_SECONDS = 5.0
"""Between two updates. After a longer gap the idle time restarts at 0: this process itself was stopped or starved."""
CPU_WINDOW_SECONDS = 2.0
"""The period over which `ActivityTracker.cpu_percent` is measured."""
MAX_RETRY_SECONDS = 15.0
"""The longest pause between two attempts to connect; PyTorch's grows while it retries."""
WAITS_FOR_DISK = "waits for a disk"
"""What a process does in the state "D"."""
_CONNECTING, _ESTABLISHED = "02", "01"
"""The states SYN_SENT and ESTABLISHED in `/proc/PID/net/tcp`."""
_MAPPED = bytes(10) + b"\xff\xff"
"""The start of an IPv4 address in a socket of IPv6."""
_TICK = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ProcessStats:
    """The kernel's counters of a process at one moment."""

    state: str
    """State of the main thread, one letter as in `ps`."""
    cpu_seconds: float
    """CPU time of all threads, and of child processes that have ended."""
    context_switches: int
    """Voluntary context switches of the main thread."""
    tracer_pid: int
    """Process ID of an attached debugger, or 0."""
    caught_signals: int
    """The signals for which the process has handlers, as a bit set."""


def read_process_stats(process_id: int) -> ProcessStats | None:
    """Read the counters of a process; None if the process is gone or the system is not Linux."""
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


def read_io_bytes(process_id: int) -> int:
    """Return how many bytes a process has read from files and pipes and written to them; 0 if that is unknown."""
    try:
        with open(f"/proc/{process_id}/io", "rb") as file:
            counts = dict(line.split(b":", 1) for line in file)
        return int(counts[b"rchar"]) + int(counts[b"wchar"])
    except (OSError, KeyError, ValueError):
        return 0


def iterate_descendants(process_id: int) -> Iterator[int]:
    """Yield the process IDs of all child processes, recursively."""
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


@dataclass(frozen=True)
class TcpConnections:
    """The remote addresses of a process's sockets, like "10.0.0.1:29500"."""

    unanswered: tuple[str, ...] = ()
    """To which it connects without an answer so far."""
    established: tuple[str, ...] = ()


def read_tcp_connections(process_id: int) -> TcpConnections:
    """Return the connections of a process that are not answered yet, and those that are."""
    found: dict[str, list[str]] = {_CONNECTING: [], _ESTABLISHED: []}
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/{process_id}/net/{table}", encoding="ascii") as file:
                rows = [line.split() for line in file][1:]
            sockets = {row[9]: (row[3], row[2]) for row in rows if row[3] in found}
            numbers = os.listdir(f"/proc/{process_id}/fd") if sockets else []
        except OSError:
            continue
        for number in numbers:
            with contextlib.suppress(OSError):
                inode = os.readlink(f"/proc/{process_id}/fd/{number}").removeprefix("socket:[").removesuffix("]")
                if inode in sockets:
                    state, address = sockets[inode]
                    found[state].append(_decode_address(address))
    return TcpConnections(tuple(found[_CONNECTING]), tuple(found[_ESTABLISHED]))


class UnansweredConnection:
    """Remember where a process tries to connect: between two attempts it sleeps, and has no socket."""

    def __init__(self, process_id: int) -> None:
        self._process_id = process_id
        self._address = ""
        self._seen_at = 0.0

    def update(self, now: float) -> None:
        """Look at the process's sockets."""
        connections = read_tcp_connections(self._process_id)
        if connections.unanswered:
            self._address, self._seen_at = connections.unanswered[0], now
        elif self._address in connections.established or now - self._seen_at > MAX_RETRY_SECONDS:
            self._address = ""

    @property
    def unanswered(self) -> str:
        """The address that has not answered, like "10.0.0.1:29500"; "" for none."""
        return self._address


def _decode_address(text: str) -> str:
    """Decode the kernel's "0100007F:1F90", whose address is in words of the machine's byte order."""
    address, _, port = text.partition(":")
    words = [bytes.fromhex(address[start : start + 8]) for start in range(0, len(address), 8)]
    data = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    if len(data) == 4:
        return f"{socket.inet_ntop(socket.AF_INET, data)}:{int(port, 16)}"
    if data.startswith(_MAPPED):
        return f"{socket.inet_ntop(socket.AF_INET, data.removeprefix(_MAPPED))}:{int(port, 16)}"
    return f"[{socket.inet_ntop(socket.AF_INET6, data)}]:{int(port, 16)}"


def describe_wait(process_id: int) -> str:
    """Say what the main thread of a sleeping process waits for, from the kernel's wait channel; "" if unknown."""
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
    """Track how long one worker has been idle; the watchdog updates it about once a second."""

    def __init__(self, process_id: int, now: float) -> None:
        self.process_id = process_id
        self.stats = read_process_stats(process_id)
        self.idle_since = now
        """The time since which the main thread and the process have been idle."""
        self.tree_idle_since = now
        """The time since which the process and its child processes have been idle, and have moved no data."""
        self.quiet_since = now
        """The time since which the process has used little CPU time, even if its main thread has run often."""
        self._updated_at = now
        self._tree: dict[int, tuple[float, int]] = {}
        """CPU seconds and bytes moved of each child process, and the bytes of the process itself."""
        self._cpu_seconds = 0.0
        """What the process has used since the first update, and its children while it was idle."""
        self._cpu: deque[tuple[float, float]] = deque()

    def update(self, now: float, *, with_bytes: bool = True) -> None:
        """Read the counters again.

        Args:
            now: `time.monotonic()` in seconds.
            with_bytes: Whether bytes that were moved since the last update count as activity.
        """
        before, seconds = self.stats, now - self._updated_at
        self.stats, self._updated_at = read_process_stats(self.process_id), now
        if self.stats is None or before is None:
            return
        cpu = self.stats.cpu_seconds - before.cpu_seconds
        self._cpu_seconds += cpu
        context_switches = self.stats.context_switches - before.context_switches
        moved = (
            cpu > MAX_IDLE_CPU_FRACTION * seconds + 1.5 * _TICK
            or context_switches > MAX_SWITCHES_PER_SECOND * seconds + 2
        )
        if cpu > MAX_QUIET_CPU_FRACTION * seconds + 1.5 * _TICK or seconds > MAX_UPDATE_GAP_SECONDS:
            self.quiet_since = now
        if moved or seconds > MAX_UPDATE_GAP_SECONDS or self.stats.state == "R":
            self.idle_since = now
        self._update_tree(now, seconds, with_bytes=with_bytes)

    def _update_tree(self, now: float, seconds: float, *, with_bytes: bool) -> None:
        if self.idle_since == now:  # the process itself is active: its children do not matter
            self._tree, cpu, moved, runs = {}, 0.0, 0, False
        else:
            before, self._tree, runs = self._tree, {self.process_id: (0.0, read_io_bytes(self.process_id))}, False
            for child in iterate_descendants(self.process_id):
                stats = read_process_stats(child)
                if stats is not None:
                    self._tree[child] = stats.cpu_seconds, read_io_bytes(child)
                    runs = runs or stats.state == "R"
            grown = [(after, before.get(child, after)) for child, after in self._tree.items()]
            cpu = sum(after[0] - earlier[0] for after, earlier in grown)
            moved = sum(after[1] - earlier[1] for after, earlier in grown) if with_bytes else 0
        is_active = cpu > MAX_IDLE_CPU_FRACTION * seconds + 1.5 * _TICK or moved > MAX_IDLE_BYTES_PER_SECOND * seconds
        if self.idle_since == now or is_active or runs:
            self.tree_idle_since = now
        self._cpu_seconds += cpu
        self._cpu.append((now, self._cpu_seconds))
        while len(self._cpu) > 2 and self._cpu[1][0] < now - CPU_WINDOW_SECONDS:
            self._cpu.popleft()

    @property
    def cpu_percent(self) -> float:
        """CPU usage in percent of one core over `CPU_WINDOW_SECONDS`; includes the children of an idle process."""
        (start, cpu_before), (end, cpu) = self._cpu[0], self._cpu[-1]
        return max(0.0, 100.0 * (cpu - cpu_before) / (end - start)) if end > start else 0.0

    @property
    def children(self) -> list[int]:
        """Process IDs of the descendants at the last update at which the process was idle."""
        return [child for child in self._tree if child != self.process_id]

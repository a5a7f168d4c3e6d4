"""Processes that change tables in a memfd and are killed: this file is a program that forks them.

It imports and compiles once, so that each process begins to change tables within milliseconds.
"""

import ctypes
import json
import mmap
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from durable_changes import SETTINGS, change_tables, open_tables

from rankless.extensions.servers.service.wire.setting_formats import decode_table_settings
from rankless.extensions.servers.tables import durable_memory, durable_tables
from rankless.extensions.servers.tables.durable_tables import DurableTables

ROOT = Path(__file__).parents[4]
_LOG_POSITION = 64 << 20
FAULTS = (
    "before the commit",
    "after the commit",
    "when memory is given back",
    "in the middle of the states",
    "when a table is opened",
    "when values are written",
    "when slots are written",
    "when used steps are written",
    "when free rows are written",
    "when counters are written",
    "when caught-up steps are written",
    "when the log is written",
    "in recovery",
    "after recovery",
)
CERTAIN_FAULTS = (
    "before the commit",
    "after the commit",
    "in the middle of the states",
    "when a table is opened",
    "when the log is written",
    "in recovery",
    "after recovery",
)
"""Moments that come with every seed."""


class KilledProcess(NamedTuple):
    """How a process ended: by which signal, and what of its last transaction the memory had then.

    Args:
        signal: The signal. 0: it ended by itself.
        logged: Records in the log.
        changed: Those whose bytes had changed already.
    """

    signal: int
    logged: int
    changed: int


class ProcessForker:
    """The program that forks processes."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._program = subprocess.Popen(
            [sys.executable, __file__, str(descriptor)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            pass_fds=[descriptor],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._program.stdout.readline()

    def run(self, seed: int, last: int, *, seconds: float | None = None, fault: tuple[str, int] | None = None):
        """Go on with transactions up to the last one. Return how the process ended."""
        request = {"seed": seed, "last": last, "seconds": seconds, "fault": fault}
        print(json.dumps(request), file=self._program.stdin, flush=True)
        killed_by = int(self._program.stdout.readline())
        return KilledProcess(killed_by, *_unfinished_changes(self._descriptor))

    def close(self) -> None:
        self._program.stdin.close()
        self._program.stdout.close()
        self._program.wait(30)


def _unfinished_changes(descriptor: int) -> tuple[int, int]:
    """Return how many records the log has, and how many of them differ from the memory."""

    def word(number: int) -> int:
        return int.from_bytes(os.pread(descriptor, 8, _LOG_POSITION + 8 * number), "little", signed=True)

    last, logged, changed = word(0), 0, 0
    while last > 1:
        position, size = word(last - 1), word(last)
        last -= 2 + (max(size, 0) + 7) // 8
        old = os.pread(descriptor, size, _LOG_POSITION + 8 * (last + 1)) if size > 0 else bytes(-size)
        logged += 1
        changed += old != os.pread(descriptor, abs(size), position)
    return logged, changed


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_at_call(owner, name: str, count: int, *, after: bool = False) -> None:
    """Let the process kill itself at a call of a function, before it does something, or afterwards."""
    function, calls = getattr(owner, name), iter(range(count, -1, -1))

    def counted(*arguments, **options):
        is_last = next(calls) == 0
        if is_last and not after:
            _kill()
        result = function(*arguments, **options)
        if is_last:
            _kill()
        return result

    setattr(owner, name, counted)


def _forbid_writing(array: np.ndarray, part: int) -> None:
    """Let the first write to a page of an array kill the process: one of those in use."""
    page = (array.ctypes.data + part) // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ) == 0


def _set_fault(name: str, count: int) -> None:
    """Prepare a fault that needs no tables."""
    if name == "before the commit":
        _kill_at_call(durable_memory.DurableMemory, "commit", count)
    elif name == "after the commit":
        _kill_at_call(durable_memory.DurableMemory, "commit", count, after=True)
    elif name == "when memory is given back":
        _kill_at_call(durable_memory.DurableMemory, "keep_only", 1 + count)
    elif name == "in the middle of the states":
        _kill_at_call(durable_tables.zlib, "crc32", 3 * count)
    elif name == "when a table is opened":
        _kill_at_call(durable_memory.DurableMemory, "set_text", 0, after=count % 2 == 0)


def _set_fault_in_memory(name: str, count: int, tables: DurableTables) -> None:
    """Prepare a fault at a write to the memory."""
    log = tables._memory.log
    if name == "when the log is written":
        _forbid_writing(log.words, mmap.PAGESIZE * (1 + count))
        return
    candidates = [
        each
        for each in tables.tables.values()
        if name != "when caught-up steps are written" or hasattr(each._optimizer, "history")
    ]
    if not candidates:
        return
    table = candidates[count % len(candidates)]
    memory = table._memory
    rows, slots, used = memory.rows, memory.id_map.slots, max(memory.used_rows, 1)
    row = count * 37 % used
    shard = count * 11 % len(slots)
    if name == "when values are written":
        _forbid_writing(rows.values, row * rows.values.strides[0])
    elif name == "when slots are written":
        capacity = int(memory.id_map.capacities[shard])
        _forbid_writing(slots, shard * slots.strides[0] + capacity * (1 + count % 2) * 16)
    elif name == "when used steps are written":
        _forbid_writing(rows.used_steps, row * 8)
    elif name == "when free rows are written":
        _forbid_writing(rows.free, 0)
    elif name == "when counters are written":
        _forbid_writing(rows.counters, 0)
    elif name == "when caught-up steps are written":
        _forbid_writing(table._optimizer.history.state().caught_up, row * 8)


def _run(descriptor: int, seed: int, last: int, fault: tuple[str, int] | None) -> None:
    name, count = fault or ("", 0)
    calls = count % 7
    if name in ("in recovery", "after recovery"):
        after = name == "after recovery"
        if not after and count % 2:  # in the middle of what is undone
            _interrupt_undoing(count)
        else:
            _kill_at_call(durable_memory, "undo_changes", 0, after=after)
    tables = DurableTables(descriptor, decode_table_settings)
    open_tables(tables, tables.committed)
    _set_fault(name, calls)
    if tables.tables:
        _set_fault_in_memory(name, count, tables)
    for transaction in range(tables.committed + 1, last + 1):
        open_tables(tables, transaction)
        tables.begin()
        change_tables(tables.tables, seed, transaction)
        tables.commit(transaction)


def _interrupt_undoing(count: int) -> None:
    """Forbid writing to the page of the record in the middle of the log, before the log is undone."""

    undo = durable_memory.undo_changes

    def interrupted(log, memory) -> None:
        positions, last = [], int(log.words[0])
        while last > 1:
            positions.append(int(log.words[last - 1]))
            last -= 2 + (max(int(log.words[last]), 0) + 7) // 8
        _forbid_writing(memory, positions[len(positions) * (count % 5) // 5])
        undo(log, memory)

    durable_memory.undo_changes = interrupted


def _wait(process_id: int, seconds: float | None) -> int:
    """Wait for a process, or kill it after some time. Return the signal that ended it."""
    descriptor = os.pidfd_open(process_id)
    if seconds is not None and not select.select([descriptor], [], [], seconds)[0]:
        os.kill(process_id, signal.SIGKILL)
    os.close(descriptor)
    _, status = os.waitpid(process_id, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit("a process has failed")
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def main(descriptor: int) -> None:
    warm = DurableTables(os.memfd_create("warm"), decode_table_settings)
    for transaction in range(1, 30):
        open_tables(warm, transaction)
        warm.begin()
        change_tables(warm.tables, 0, transaction)
        if transaction == 20:
            warm.undo()
        else:
            warm.commit(transaction)
    assert list(warm.tables) == list(SETTINGS)
    warm.close()
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        process_id = os.fork()
        if process_id == 0:
            try:
                _run(descriptor, request["seed"], request["last"], request["fault"])
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        print(_wait(process_id, request["seconds"]), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))

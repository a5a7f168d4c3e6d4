"""Forks a worker: the new process takes the place of a worker that was lost, with all that this one has in memory.

Note [replacement by a fork]: only a copy of a process has what a script has in its variables, at the line where it is.
What makes the copy a process of its own:

- It has one thread. The threads of OpenMP are ended before the fork, in the way in which OpenMP itself does so, and
  both processes start them again when they compute. What Rankless needs threads for, it starts again.
- Open files have one position in both processes. So the copy opens those that are read again.
- Memory that is shared with other processes is copied, all but the status page, for which it gets one of its own.
- Output, the channel to the agent and the status page are those of the lost worker, under the same descriptors.

A script may have what cannot be copied: a thread of its own, a child process, a connection, a file that it writes. Then
there is no replacement, and the others continue without the lost worker, as they do when a host is lost.
"""

import contextlib
import ctypes
import gc
import mmap
import os
import signal
import socket
import stat
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from rankless.config import environment
from rankless.config.process_configs import WorkerConfig, WorkerLaunch
from rankless.runtime.linux_process_control import set_parent_death_signal
from rankless.runtime.redirect_output import send_output_to
from rankless.terminal import process_title

NEEDLESS = ("_MainThread", "TMonitor")
"""The kinds of threads that every process has, or need not have: tqdm updates bars with its own."""
HARMLESS = "jemalloc_bg_thd"
"""The thread with which a memory allocator gives memory back."""
SAVING = "rankless-save"
"""The thread that writes a checkpoint. The others of Rankless are started again, or are of no use to the copy."""
_MAP_FIXED = 0x10
_BLOCK_BYTES = 1 << 24
_PAUSE_SOFT = 1
"""`omp_pause_soft` of OpenMP 5.0: the threads end, and settings stay."""
_ENDING_SECONDS = 0.5
"""How long threads and child processes may take that have been asked to end."""


class InReplacement:
    """What a process does that takes the place of a worker, with the configuration of that worker."""

    def __init__(self) -> None:
        self._functions: list[Callable[[WorkerConfig], None]] = []

    def call(self, function: Callable[[WorkerConfig], None]) -> None:
        """Call a function in such a process, after those that have been given before."""
        self._functions.append(function)

    def run(self, config: WorkerConfig) -> None:
        """Call all functions: this is such a process."""
        for function in self._functions:
            function(config)


IN_REPLACEMENT = InReplacement()
"""Of this process, whose parts do not know each other."""


def explain_obstacle(config: WorkerConfig) -> str:
    """Return what a copy of this process could not have; "" if there is no such thing.

    Args:
        config: The configuration of this worker.
    """
    if sys.platform != "linux":
        return "a system other than Linux"
    if threading.current_thread() is not threading.main_thread():
        return f"its call is in the thread {threading.current_thread().name}"
    if config.terminal:
        return "it has the terminal (--debug-rank)"
    deadline = time.monotonic() + _ENDING_SECONDS
    while obstacle := next(_list_threads_and_children(), ""):
        if time.monotonic() > deadline:
            return obstacle
        time.sleep(0.005)
    return next(_explain_descriptors(config), "")


def _list_threads_and_children() -> Iterator[str]:
    for thread in threading.enumerate():
        is_own = thread.name.startswith("rankless") and thread.name != SAVING
        if not is_own and type(thread).__name__ not in NEEDLESS:
            yield f"its script has the thread {thread.name}"
    # Libraries without a name for their threads, such as OpenBLAS, start them again. Others wait for them. A copy of
    # another worker may have threads with the title of that one.
    harmless = {_read_name(os.getpid()), HARMLESS, *(thread.name[:15] for thread in threading.enumerate())}
    for path in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            for child in (path / "children").read_text().split():
                yield f"its script has a child process ({child})"
            name = _read_name(path.name)
            if name not in harmless and not sys.executable.endswith(name) and not process_title.is_of_worker(name):
                yield f"a library that it uses has the thread {name}"


def _read_name(task: int | str) -> str:
    return Path(f"/proc/self/task/{task}/comm").read_text().rstrip("\n")


def _explain_descriptors(config: WorkerConfig) -> Iterator[str]:
    for number in list_descriptors():
        with contextlib.suppress(OSError):
            mode, target = os.fstat(number).st_mode, os.readlink(f"/proc/self/fd/{number}")
            if number <= 2 or target.startswith(("/memfd:", "/dev/")):
                continue
            if stat.S_ISSOCK(mode) and not _is_own_socket(number, config):
                yield "its script has a connection"
            elif stat.S_ISREG(mode) and read_flags(number) & os.O_ACCMODE != os.O_RDONLY:
                yield f"its script has {target} open for writing"


def list_descriptors() -> list[int]:
    """Return the open descriptors of this process."""
    return sorted(int(name) for name in os.listdir("/proc/self/fd"))


def read_flags(descriptor: int) -> int:
    """Return the flags with which a descriptor was opened."""
    lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
    return next(int(line.split()[1], 8) for line in lines if line.startswith("flags:"))


def _is_own_socket(descriptor: int, config: WorkerConfig) -> bool:
    """Whether a socket is a channel to the agent, perhaps for the copy of another worker, or leads to the store."""
    with socket.socket(fileno=os.dup(descriptor)) as end:
        if end.family == socket.AF_UNIX:
            return end.type == socket.SOCK_SEQPACKET
        return end.getpeername()[1] in (config.store_port, config.master_port)


def fork_replacement(launch: WorkerLaunch, descriptors: Sequence[int], report: Callable[[int], None]) -> bool:
    """Fork a process that takes the place of a lost worker. It becomes a child of the fork server.

    Args:
        launch: That of the lost worker.
        descriptors: The new end of its channel, and its status page if it has one.
        report: Called in this process with the process id of the new one, which continues only afterwards.

    Returns:
        Whether this is the new process.

    Raises:
        OSError: There are no resources for another process.
    """
    old = environment.read_worker_config()
    assert old is not None, "a worker"
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the script may have put any object there
            stream.flush()
    gc.collect()  # groups of earlier rounds have threads, for which their destructors would wait in the new process
    end_openmp_threads()
    own, other = socket.socketpair()
    with own, other:
        between = _fork()
        if between == 0:
            _fork_orphan(other)  # returns in the new process alone
            own.close()
            _begin(launch, old, descriptors, other)
            return True
        os.waitpid(between, 0)
        other.close()
        number = own.recv(32)
        if not number:
            raise OSError("a process could not be forked")
        report(int(number))
        own.send(b"\n")
    return False


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forks of processes with threads
        return os.fork()


def _fork_orphan(numbers: socket.socket) -> None:
    """Fork a process, send its process id, and end this one. Returns in the new process alone."""
    new = -1
    try:
        new = _fork()
    finally:
        if new > 0:
            numbers.send(b"%d" % new)
        if new:
            os._exit(0)


def end_openmp_threads() -> None:
    """End the threads with which operators compute. They start again when they are needed."""
    libraries = {line.split()[-1] for line in _read_maps() if "gomp" in line or "libomp" in line or "libiomp" in line}
    for library in libraries:
        with contextlib.suppress(OSError, AttributeError):  # it is older than OpenMP 5.0
            ctypes.CDLL(library).omp_pause_resource_all(_PAUSE_SOFT)


def _begin(launch: WorkerLaunch, old: WorkerConfig, descriptors: Sequence[int], permission: socket.socket) -> None:
    """Take the place of a lost worker, once the process that was copied allows it."""
    try:
        if not permission.recv(1):
            os._exit(1)  # that process has ended, and the agent knows nothing of this one
        set_parent_death_signal(signal.SIGKILL)
        _separate_memory(old, descriptors)
        for new, taken in zip(descriptors, (old.recovery_descriptor, old.status_descriptor), strict=False):
            assert taken is not None
            os.dup2(new, taken, inheritable=False)
            os.close(new)
        for number in list_descriptors():
            _open_again(number)
        send_output_to(launch.config.log_file, launch.config.error_log_file)
        environment.apply(launch.environment)
        config = msgspec.structs.replace(
            launch.config,
            process_id=os.getpid(),
            records_descriptor=old.records_descriptor,
            recovery_descriptor=old.recovery_descriptor,
            status_descriptor=old.status_descriptor,
            terminal=(),
        )
        environment.write_worker_config(config)
        IN_REPLACEMENT.run(config)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _open_again(descriptor: int) -> None:
    """Open a file that is read again under its descriptor, with a position of its own."""
    try:
        found, flags = os.fstat(descriptor), read_flags(descriptor)
    except OSError:  # the one with which descriptors were listed
        return
    if not stat.S_ISREG(found.st_mode) or flags & os.O_ACCMODE != os.O_RDONLY:
        return
    opened = os.open(f"/proc/self/fd/{descriptor}", flags & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC))
    os.lseek(opened, os.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
    os.dup2(opened, descriptor, inheritable=os.get_inheritable(descriptor))
    os.close(opened)


def _separate_memory(old: WorkerConfig, descriptors: Sequence[int]) -> None:
    """Copy memory that is shared with other processes. The new status page takes the place of the old one."""
    page = descriptors[1] if len(descriptors) > 1 else None
    inode = None if old.status_descriptor is None else os.fstat(old.status_descriptor).st_ino
    for line in _read_maps():
        addresses, access, offset, _device, number, *_name = line.split()
        if not access.startswith("rw") or not access.endswith("s"):
            continue
        start, end = (int(each, 16) for each in addresses.split("-"))
        if page is not None and int(number) == inode:
            os.pwrite(page, ctypes.string_at(start, end - start), int(offset, 16))
            _map(start, end - start, mmap.MAP_SHARED, page, int(offset, 16))
            continue
        for block in range(start, end, _BLOCK_BYTES):
            data = ctypes.string_at(block, min(_BLOCK_BYTES, end - block))
            _map(block, len(data), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
            if data.strip(b"\0"):
                ctypes.memmove(block, data, len(data))


def _map(start: int, length: int, flags: int, descriptor: int, offset: int) -> None:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
    )
    found = function(start, length, mmap.PROT_READ | mmap.PROT_WRITE, flags | _MAP_FIXED, descriptor, offset)
    if found != start:
        raise OSError(ctypes.get_errno(), "memory could not be mapped")


def _read_maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()

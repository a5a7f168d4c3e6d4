"""Releases ranks that wait in a collective for one that does not answer, from the parent of the ranks.

The fork server calls this when a run ends before its ranks do: what waits in their connections, or in their groups in
shared memory, raises.

Note [cutting]: a collective waits in C++ for minutes if its peer is silent, is stopped or never arrives. Meanwhile no
Python of that rank runs: no signal handler, no `except`, no `finally`. To close its connections from inside would take
a thread in every worker. From outside, the parent of a process may copy its descriptors (pidfd_getfd, Linux 5.6). A
shutdown applies to all copies, so the collective finds its connection closed and raises. If the kernel or the filter of
a container forbids this, nothing happens, and the agent kills the rank like any other.

Note [ending groups in shared memory]: a rank that waits looks at its group's memory at least every 50 ms. The parent of
the ranks writes there that the run ends. It finds the memory among the open files of the ranks, as files of the
launcher's own user.
"""

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from rankless.records.group_failure_codes import (
    FAILURE_OFFSET,
    GROUP_MARK,
    MARK_OFFSET,
    WORD_BYTES,
    FailureKind,
    encode_failure,
)
from rankless.runtime.linux_process_control import descendants

_PIDFD_GETFD = 438
"""The system call's number, the same on all architectures; neither Python nor older C libraries have it."""
_WORD = struct.Struct("=Q")
_NAME_PART = "rankless-"
"""In the name of every memory that processes of a run share."""


@dataclass(frozen=True)
class _ConnectionEnd:
    """One end of a connection, and the rank that holds it."""

    rank: int
    socket: socket.socket
    own: tuple[str, int]
    other: tuple[str, int]


def cut_connections(ranks: Mapping[int, int], *, hosts: Collection[str], store_port: int | None = None) -> None:
    """Shut down the TCP connections of these ranks to one another, to `hosts` and to the run's store.

    All other connections stay open: the clean-up of a script may need its database.

    Args:
        ranks: The rank of each process, by process id. Descendants of a process count as that process.
        hosts: Numeric addresses of other hosts.
        store_port: The port of the store, which the agent of host 0 serves. None if there is no store.
    """
    with ExitStack() as stack:
        ends = [end for process_id, rank in ranks.items() for end in _ends_of(process_id, rank, stack)]
        owners = {end.own: end.rank for end in ends}
        for end in ends:
            if end.other[0] in hosts or end.other[1] == store_port or owners.get(end.other, end.rank) != end.rank:
                with suppress(OSError):  # the other side may have closed it
                    end.socket.shutdown(socket.SHUT_RDWR)


def _ends_of(process_id: int, rank: int, stack: ExitStack) -> Iterator[_ConnectionEnd]:
    for each in (process_id, *descendants(process_id)):
        try:
            process = os.pidfd_open(each)
        except (AttributeError, OSError):  # the system has no such call, or the process is gone
            continue
        stack.callback(os.close, process)
        for copy in _sockets_of(each, process, stack):
            with suppress(OSError):  # it is not connected
                yield _ConnectionEnd(rank, copy, _address(copy.getsockname()), _address(copy.getpeername()))


def _sockets_of(process_id: int, process: int, stack: ExitStack) -> Iterator[socket.socket]:
    with suppress(OSError):
        for name in os.listdir(f"/proc/{process_id}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{process_id}/fd/{name}").startswith("socket:"):
                    copy = stack.enter_context(socket.socket(fileno=_copy_descriptor(process, int(name))))
                    if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                        yield copy


def _copy_descriptor(process: int, descriptor: int) -> int:
    """Copy a descriptor of another process into this one. Raises OSError if that is not allowed."""
    copy = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, descriptor, 0)
    if copy < 0:
        raise OSError(ctypes.get_errno() or errno.ENOSYS, "pidfd_getfd")
    return int(copy)


def _address(name: tuple[str, int]) -> tuple[str, int]:
    """Return address and port. An IPv4 connection of an IPv6 socket has its IPv4 address."""
    return name[0].removeprefix("::ffff:"), name[1]


def end_shared_groups(process_ids: Iterable[int]) -> None:
    """End the groups in shared memory of these processes and their descendants. Their waits raise `CollectiveError`."""
    for process_id in process_ids:
        for each in (process_id, *descendants(process_id)):
            for path in _find_memory(each):
                with suppress(OSError):  # the process has ended, or has closed the group
                    _end_group(path)


def _find_memory(process_id: int) -> Iterator[str]:
    with suppress(OSError):
        for name in os.listdir(f"/proc/{process_id}/fd"):
            path = f"/proc/{process_id}/fd/{name}"
            with suppress(OSError):
                if _NAME_PART in os.readlink(path):
                    yield path


def _end_group(path: str) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        head = os.pread(descriptor, MARK_OFFSET + WORD_BYTES, FAILURE_OFFSET)
        if len(head) == MARK_OFFSET + WORD_BYTES:
            (word,), (mark,) = _WORD.unpack_from(head, FAILURE_OFFSET), _WORD.unpack_from(head, MARK_OFFSET)
            if mark == GROUP_MARK and not word:
                os.pwrite(descriptor, _WORD.pack(encode_failure(FailureKind.RUN_ENDED, 0)), FAILURE_OFFSET)
    finally:
        os.close(descriptor)

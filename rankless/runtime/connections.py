"""Shutting down the connections between ranks, from outside: a rank that waits in one raises then, where it waits.

Note [cutting]: a collective whose peer is silent, stopped or never comes waits in C++ for minutes, and meanwhile no
Python of that rank runs: no signal's handler, no `except`, no `finally`. Its connections cannot be ended from inside
without a thread in every worker. From outside, the parent of a process may take a copy of its descriptors
(pidfd_getfd, Linux 5.6), and a shutdown holds for all copies: the collective finds its connection closed and raises.
Where the kernel, or a container's filter, does not allow that, nothing happens, and the rank is killed like any other.
"""

import contextlib
import ctypes
import errno
import os
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from rankless.runtime.process_tree import descendants

_PIDFD_GETFD = 438
"""The system call's number, the same on all architectures; neither Python nor older C libraries have it."""


@dataclass(frozen=True)
class _End:
    """One end of a connection, and the rank's whose it is."""

    rank: int
    socket: socket.socket
    own: tuple[str, int]
    other: tuple[str, int]


def cut_connections(ranks: Mapping[int, int], *, hosts: Collection[str]) -> None:
    """Shut down the TCP connections of these ranks' processes, and of what those have started, to one another and to
    `hosts` (numeric addresses).

    `ranks` are the ranks by process. All other connections stay: the clean-up of a script may need its database.
    """
    with ExitStack() as stack:
        ends = [end for process_id, rank in ranks.items() for end in _ends_of(process_id, rank, stack)]
        owners = {end.own: end.rank for end in ends}
        for end in ends:
            if end.other[0] in hosts or owners.get(end.other, end.rank) != end.rank:
                with contextlib.suppress(OSError):  # the other side may have closed it
                    end.socket.shutdown(socket.SHUT_RDWR)


def _ends_of(process_id: int, rank: int, stack: ExitStack) -> Iterator[_End]:
    for each in (process_id, *descendants(process_id)):
        try:
            process = os.pidfd_open(each)
        except (AttributeError, OSError):  # no such call here; or the process is gone
            continue
        stack.callback(os.close, process)
        for copy in _sockets_of(each, process, stack):
            with contextlib.suppress(OSError):  # it is not connected
                yield _End(rank, copy, _address(copy.getsockname()), _address(copy.getpeername()))


def _sockets_of(process_id: int, process: int, stack: ExitStack) -> Iterator[socket.socket]:
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{process_id}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{process_id}/fd/{name}").startswith("socket:"):
                    copy = stack.enter_context(socket.socket(fileno=_copied(process, int(name))))
                    if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                        yield copy


def _copied(process: int, descriptor: int) -> int:
    """This process's copy of a descriptor of another. Raises OSError where that is not allowed."""
    copy = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, descriptor, 0)
    if copy < 0:
        raise OSError(ctypes.get_errno() or errno.ENOSYS, "pidfd_getfd")
    return int(copy)


def _address(name: tuple[str, int]) -> tuple[str, int]:
    """Address and port; of an IPv4 connection of an IPv6 socket the IPv4 address."""
    return name[0].removeprefix("::ffff:"), name[1]

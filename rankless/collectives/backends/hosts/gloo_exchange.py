"""Moves bytes between the ranks of several hosts, over a Gloo group that is used for nothing else.

Note [shutting down]: Gloo cannot end an operation that waits: `abort` does nothing, and the group's destructor waits
until the operation's timeout. So each rank remembers which sockets belong to the group, and shuts them down when the
group fails. The ranks find the sockets when they make the group: a new socket is one of the group's if another rank has
its other end.
"""

import json
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import AllToAllOptions

from rankless.collectives.backends.gloo_group import make_gloo_group
from rankless.collectives.backends.store_exchange import StoreExchange

SLICE = timedelta(milliseconds=50)
"""The longest wait before a rank looks whether the group has failed."""

_SLICE_IS_OVER = "Operation timed out"
Address = tuple[str, int]


class ExchangeTimeout(Exception):
    """An operation is not done within its time."""


@dataclass(frozen=True)
class _RankConnection:
    """A socket of a Gloo group: its descriptor, the addresses of both ends, and the rank at the other end."""

    descriptor: int
    own: Address
    other: Address
    peer: int


class GlooExchange:
    """A Gloo group of ranks that send each other bytes. All its ranks make it at the same time.

    Args:
        store: A store with keys of its own for this group.
        rank: This process's rank among those that exchange.
        size: Their number.
        timeout: How long to wait for the others while the group is made.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size = rank, size
        self.limit_seconds = timeout.total_seconds()
        """How long `wait` may take for what `start` begins, about. Gloo's own timeout is longer, and ends what is left
        where the connections cannot be shut down."""
        before = set(_list_connections())
        self.group: Any = make_gloo_group(store, rank, size, timeout)
        opened = {key: value for key, value in _list_connections().items() if key not in before}
        self._connections = _match_ends(StoreExchange(store, "ends", rank=rank, size=size, timeout=timeout), opened)

    def start(
        self, outgoing: Tensor, outgoing_counts: Sequence[int], incoming: Tensor, incoming_counts: Sequence[int]
    ) -> Any:
        """Begin to send bytes to all ranks and to receive bytes from them.

        Args:
            outgoing: Flat uint8: what each rank gets, one after the other.
            outgoing_counts: The number of bytes for each rank.
            incoming: Flat uint8, for what each rank sends, one after the other.
            incoming_counts: The number of bytes from each rank.

        Returns:
            The work, for `wait`. The tensors must not change until then.
        """
        options = AllToAllOptions()
        options.timeout = timedelta(seconds=2 * self.limit_seconds + 10)
        return self.group.alltoall_base(incoming, outgoing, list(incoming_counts), list(outgoing_counts), options)

    def wait(self, work: Any, seconds: float, check: Callable[[], None]) -> None:
        """Return when an operation is done.

        Args:
            work: The operation.
            seconds: How long it may take.
            check: Called again and again. It raises if the group has failed.

        Raises:
            ExchangeTimeout: The operation is not done in time.
            RuntimeError: A connection is lost.
        """
        start = time.monotonic()
        while not work.is_completed():
            try:
                work.wait(SLICE)
                return
            except RuntimeError as error:
                # The operation has failed, the slice is over, or a signal handler of the script raises. An operation
                # may end just after its slice: the last wait says how.
                if _SLICE_IS_OVER not in str(error):
                    raise
            check()
            if time.monotonic() - start > seconds:
                raise ExchangeTimeout
        work.wait()

    def find_closed(self) -> int | None:
        """Return a rank whose connection is closed; None if there is none."""
        for connection in self._connections:
            try:
                with _copy_socket(connection.descriptor) as copy:
                    if _find_ends(copy) == (connection.own, connection.other) and not _is_closed(copy):
                        continue
            except OSError:
                pass  # not connected any more
            return connection.peer
        return None

    def shut_down(self) -> None:
        """End all connections: the waits of this rank, and of the ranks at the other ends, raise."""
        for connection in self._connections:
            with suppress(OSError), _copy_socket(connection.descriptor) as copy:
                # Gloo may have closed the socket, and the descriptor may be another file's by now.
                if _find_ends(copy) == (connection.own, connection.other):
                    copy.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release the group."""
        self.group = None


def _list_connections() -> dict[tuple[Address, Address], int]:
    """Return the descriptors of this process's TCP connections, by the addresses of both ends."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), _copy_socket(int(name)) as copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                found[_find_ends(copy)] = int(name)
    return found


def _is_closed(connection: socket.socket) -> bool:
    """Return whether the other end has closed a connection, without reading from it."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))


def _copy_socket(descriptor: int) -> socket.socket:
    """Return the socket of a descriptor under another one. Raises OSError if it is no socket."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _find_ends(connection: socket.socket) -> tuple[Address, Address]:
    own, other = connection.getsockname(), connection.getpeername()
    return (_plain(own[0]), own[1]), (_plain(other[0]), other[1])


def _plain(address: str) -> str:
    """Return an address without the prefix that an IPv4 connection of an IPv6 socket has."""
    return address.removeprefix("::ffff:")


def _match_ends(exchange: StoreExchange, opened: dict[tuple[Address, Address], int]) -> list[_RankConnection]:
    """Return which new connections of this process lead to another rank of the exchange."""
    answers = exchange.gather("connections", json.dumps([list(ends) for ends in opened]))
    owners = {
        (tuple(own), tuple(other)): peer for peer, answer in enumerate(answers) for own, other in json.loads(answer)
    }
    return [
        _RankConnection(descriptor, own, other, owners[other, own])
        for (own, other), descriptor in opened.items()
        if owners.get((other, own), exchange.rank) != exchange.rank
    ]

"""The clients of a listening socket that have not shown yet that they know its token.

Note [new clients]: whoever reaches a socket may open connections and say nothing. So new clients have few places, and a
short time. A client that needs a place takes that of the oldest one. A client that knows the token needs its place for
some milliseconds; if it loses it to a flood of others, it connects again.
"""

import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

MAX_NEW_CLIENTS = 256
HANDSHAKE_SECONDS = 10.0
REPORT_SECONDS = 10.0

Client = TypeVar("Client")


class NewClients(Generic[Client]):
    """At most MAX_NEW_CLIENTS clients, none for longer than HANDSHAKE_SECONDS."""

    def __init__(self, drop: Callable[[Client], None]) -> None:
        """Start without clients.

        Args:
            drop: Closes the connection of a client that has lost its place, or whose time is over.
        """
        self._drop = drop
        self._since: dict[Client, float] = {}

    def __iter__(self) -> Iterator[Client]:
        return iter(self._since)

    def __len__(self) -> int:
        return len(self._since)

    def add(self, client: Client, now: float) -> None:
        """Give a client a place: if none is free, that of the oldest one."""
        if len(self._since) >= MAX_NEW_CLIENTS:
            self._remove_and_drop(next(iter(self._since)))
        self._since[client] = now

    def remove(self, client: Client) -> None:
        """Free the place of a client that has shown that it knows the token, or has left."""
        self._since.pop(client, None)

    def drop_late(self, now: float) -> None:
        """Drop the clients whose time is over."""
        while self._since:
            oldest, since = next(iter(self._since.items()))
            if now - since <= HANDSHAKE_SECONDS:
                return
            self._remove_and_drop(oldest)

    def _remove_and_drop(self, client: Client) -> None:
        self._since.pop(client)
        self._drop(client)


class RejectedClients:
    """Counts the clients that a socket has rejected, and reports them in one line every REPORT_SECONDS at most."""

    def __init__(self, socket_name: str, notify: Callable[[str], None]) -> None:
        """Start without rejected clients.

        Args:
            socket_name: What the line calls the socket, such as "the control port".
            notify: Receives the line. The first rejected client is reported at once.
        """
        self._socket_name, self._notify = socket_name, notify
        self._counts: dict[tuple[str, str], int] = {}
        self._next_report_at = 0.0

    def add(self, address: str, reason: str, now: float | None = None) -> None:
        """Count a client, and report all that have been counted since the last line, if a line is due."""
        self._counts[address, reason] = self._counts.get((address, reason), 0) + 1
        self.report(time.monotonic() if now is None else now)

    def report(self, now: float) -> None:
        """Report the clients that have been counted since the last line, if a line is due."""
        if not self._counts or now < self._next_report_at:
            return
        self._next_report_at = now + REPORT_SECONDS
        total = sum(self._counts.values())
        (address, reason), count = max(self._counts.items(), key=lambda each: each[1])
        self._counts.clear()
        others = f", and {total - count} others" if total > count else ""
        times = f" {count} times" if count > 1 else ""
        self._notify(f"{self._socket_name} rejected a client at {address}{times}: {reason}{others}")

"""Connects the ranks of a job: each connects to rank 0, whose endpoint it reads from the store.

Rank 0 listens on a Unix socket for the ranks of its own host, and on a TCP port for the ranks of other hosts. A token
in the store keeps other processes out.
"""

import hmac
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from rankless.collectives.shared_memory_file import host_identity
from rankless.errors import JoinError
from rankless.extensions.horovod.engine.connections import ConnectionClosed, RankConnection
from rankless.extensions.horovod.engine.messages import (
    Hello,
    Welcome,
    decode_coordinator_message,
    decode_rank_message,
    encode,
)
from rankless.extensions.horovod.exceptions import HorovodInternalError
from rankless.records.number_formatting import format_ranks
from rankless.records.private_files import is_own_user
from rankless.records.unauthenticated_client_limits import NewClients

LOG_INTERVAL_SECONDS = 5.0
ACCEPTS_PER_POLL = 64
MAX_HELLO_BYTES = 4096
MIN_SLEEP_SECONDS = 0.001
MAX_SLEEP_SECONDS = 0.02


@dataclass(frozen=True)
class ConnectedRanks:
    """The ranks of a job after the rendezvous."""

    connections: Mapping[int, RankConnection]
    """On rank 0 those to all other ranks, on the others the one to rank 0, by rank."""
    hosts: tuple[str, ...]
    """The host of each rank."""


def connect_ranks(store: Any, *, rank: int, size: int, address: str, timeout_seconds: float) -> ConnectedRanks:
    """Connect this rank with the others. Raises HorovodInternalError that names the ranks missing after the timeout."""
    host = host_identity()
    if size == 1:
        return ConnectedRanks({}, (host,))
    store.set(f"host/{rank}", host)
    waiter = _StoreWaiter(store, timeout_seconds)
    if rank == 0:
        hosts = tuple(waiter.get(f"host/{other}", other) for other in range(size))
        return _accept_ranks(store, hosts, address, waiter)
    endpoint = json.loads(waiter.get("coordinator", 0))
    return _connect_to_coordinator(endpoint, rank, host, waiter)


class _StoreWaiter:
    """Waits for other ranks with one timeout for all, and logs every few seconds which ranks are missing."""

    def __init__(self, store: Any, seconds: float) -> None:
        self._store = store
        self._seconds = seconds
        self._start = self._last_log = time.monotonic()
        self._sleep_seconds = MIN_SLEEP_SECONDS

    def get(self, key: str, rank: int) -> str:
        """Return the value of a key once the rank has set it."""
        while not self._store.check([key]):
            self.wait(f"rank {rank}")
        return bytes(self._store.get(key)).decode()

    def wait(self, missing: str) -> None:
        """Sleep for a moment. Raises HorovodInternalError after the timeout."""
        now = time.monotonic()
        if now - self._start > self._seconds:
            error = JoinError(
                expected="every process of the job to call hvd.init()",
                found=f"{missing} did not call it within {self._seconds:.0f} s",
                fix="see what it does instead: its log, or py-spy dump --pid; HOROVOD_START_TIMEOUT sets a longer wait",
            )
            raise HorovodInternalError(f"hvd.init: {error}")
        if now - self._last_log > LOG_INTERVAL_SECONDS:
            self._last_log = now
            print(f"rankless: hvd.init: waiting for {missing}, {now - self._start:.0f} s", file=sys.stderr, flush=True)
        self._store.check(["host/0"])  # raises once the round of an elastic job is over, and its store closed
        time.sleep(self._sleep_seconds)
        self._sleep_seconds = min(self._sleep_seconds * 1.5, MAX_SLEEP_SECONDS)


def _accept_ranks(store: Any, hosts: tuple[str, ...], address: str, waiter: _StoreWaiter) -> ConnectedRanks:
    """Accept the connections of all other ranks, then send each a Welcome."""
    token = secrets.token_hex(16)
    local = socket.socket(socket.AF_UNIX)
    local.bind(f"\0rankless-horovod-{secrets.token_hex(8)}")
    local.listen(1024)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    remote = socket.create_server((address, 0), family=family, backlog=1024)
    listeners = (local, remote)
    name = local.getsockname()[1:].decode()
    endpoint = {"token": token, "local": name, "address": address, "port": remote.getsockname()[1]}
    for listener in listeners:
        listener.setblocking(False)
    store.set("coordinator", json.dumps(endpoint))
    connections: dict[int, RankConnection] = {}
    new_clients: NewClients[RankConnection] = NewClients(RankConnection.close)
    process_ids = [0] * len(hosts)
    while len(connections) < len(hosts) - 1:
        for listener in listeners:
            _accept_waiting(listener, new_clients)
        for connection in list(new_clients):
            hello = _read_hello(connection, token)
            if hello is not None and 0 < hello.rank < len(hosts):
                connections[hello.rank] = connection
                process_ids[hello.rank] = hello.process_id
            if hello is not None or connection.is_closed:
                new_clients.remove(connection)
        new_clients.drop_late(time.monotonic())
        missing = [rank for rank in range(1, len(hosts)) if rank not in connections]
        if missing:
            waiter.wait(format_ranks(missing))
    for listener in listeners:
        listener.close()
    welcome = encode(Welcome(hosts, tuple(process_ids)))
    for connection in connections.values():
        with suppress(ConnectionClosed):  # the first operation finds that the rank is gone
            connection.send(welcome)
    return ConnectedRanks(connections, hosts)


def _accept_waiting(listener: socket.socket, new_clients: NewClients[RankConnection]) -> None:
    """Accept the connections that wait. On this host only processes of this user may connect."""
    for _ in range(ACCEPTS_PER_POLL):
        try:
            accepted, _ = listener.accept()
        except OSError:  # no more clients, or no descriptors
            return
        if accepted.family == socket.AF_UNIX and not is_own_user(accepted):
            accepted.close()
            continue
        connection = RankConnection(accepted, max_bytes=MAX_HELLO_BYTES)
        new_clients.add(connection, time.monotonic())


def _read_hello(connection: RankConnection, token: str) -> Hello | None:
    """Return the Hello of a connection if it has arrived with the right token."""
    try:
        for data, _ in connection.receive():
            hello = decode_rank_message(data)
            if isinstance(hello, Hello) and hmac.compare_digest(hello.token.encode(), token.encode()):
                connection.accept_long_messages()
                return hello
            connection.close()
            connection.is_closed = True
    except (ConnectionClosed, msgspec.DecodeError):
        connection.is_closed = True
    return None


def _connect_to_coordinator(endpoint: dict[str, Any], rank: int, host: str, waiter: _StoreWaiter) -> ConnectedRanks:
    connection = RankConnection(_open_socket(endpoint, waiter))
    hello: bytes | None = encode(Hello(rank=rank, token=endpoint["token"], host=host, process_id=os.getpid()))
    while True:
        try:
            if hello is not None:
                connection.send(hello)
            hello = None
            for data, _ in connection.receive():
                welcome = decode_coordinator_message(data)
                if isinstance(welcome, Welcome):
                    return ConnectedRanks({0: connection}, welcome.hosts)
        except ConnectionClosed:
            error = JoinError(
                expected="rank 0 to stay connected until all ranks have called hvd.init()",
                found="it closed the connection",
                fix="see rank 0's log: it has failed, or was stopped",
            )
            raise HorovodInternalError(f"hvd.init: {error}") from None
        waiter.wait("the other ranks")


def _open_socket(endpoint: dict[str, Any], waiter: _StoreWaiter) -> socket.socket:
    """Connect to rank 0's Unix socket, or to its TCP port from another host."""
    local = socket.socket(socket.AF_UNIX)
    try:
        local.connect("\0" + endpoint["local"])
        return local
    except OSError:
        local.close()
    while True:
        with suppress(OSError):
            return socket.create_connection((endpoint["address"], endpoint["port"]), timeout=LOG_INTERVAL_SECONDS)
        waiter.wait(f"rank 0 at {endpoint['address']}:{endpoint['port']}")

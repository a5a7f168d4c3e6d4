"""Connections between the first ranks of the hosts, over which sync points travel.

Note [sync points between hosts]: the first rank of each host sends its sync points to rank 0 over a TCP connection of
their own. Rank 0 compares them with its own sync points as they arrive, and nobody waits for an answer. So a difference
is found when the other host's message arrives: usually after the collectives of the same call, otherwise at the next
sync point. If rank 0 finds a difference, it sends the error to all other hosts. A message costs two system calls per
sync point, and works under every launcher. The channel between agents would add two more processes to the way of each
message, exists only under `rankless run`, and does not lead back to the ranks.
"""

import hmac
import secrets
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from torch.distributed import distributed_c10d

from rankless.collectives.byte_messages import all_gather_bytes
from rankless.config.hosts_and_addresses import interface_towards
from rankless.errors import RanksDiverged
from rankless.parallel.mesh import Mesh
from rankless.records.encoding import encode_msgpack
from rankless.records.framing import FrameDecoder, FrameFormat, FrameTooLongError, receive_exactly
from rankless.records.unauthenticated_client_limits import NewClients

NUMBER = struct.Struct("<Q")
FRAMES = FrameFormat("<I")
TOKEN_BYTES = 16
MAX_FRAME_BYTES = 16_384
MAX_UNSENT_BYTES = 1 << 20
"""Unsent bytes at which a connection is closed: its host no longer reads."""
CONNECT_SECONDS = 3.0
ACCEPT_SECONDS = 10.0
_RECEIVE_BYTES = 1 << 16


class ErrorMessage(msgspec.Struct, frozen=True, kw_only=True):
    """An error that rank 0 has found, for the ranks of all hosts."""

    expected: str
    found: str
    fix: str
    where: str | None

    def to_error(self) -> RanksDiverged:
        """Return the error."""
        return RanksDiverged(expected=self.expected, found=self.found, fix=self.fix, where=self.where)


class HostConnection:
    """One end of the connection between rank 0 and the first rank of another host. It never blocks."""

    def __init__(self, connection: socket.socket, host: int) -> None:
        self.host = host
        self.arrived: deque[bytes] = deque()
        """Messages that have arrived and nobody has taken."""
        self.is_open = True
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._unsent = bytearray()
        self._decoder = FrameDecoder(FRAMES, max_bytes=MAX_FRAME_BYTES)

    def send(self, message: bytes) -> None:
        """Send a message, or keep it until the next call if the other end lags. Does nothing on a closed connection."""
        if not self.is_open:
            return
        self._unsent += FRAMES.encode(message)
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            if len(self._unsent) > MAX_UNSENT_BYTES:
                self.close()
        except OSError:  # the other process is gone, and its own end is reported elsewhere
            self.close()

    def receive(self) -> None:
        """Append the messages that have arrived to `arrived`."""
        try:
            while self.is_open:
                data = self._socket.recv(_RECEIVE_BYTES)
                self._decoder.feed(data)
                self.arrived.extend(self._decoder.messages())
                if not data:
                    self.close()
                if len(data) < _RECEIVE_BYTES:
                    return
        except BlockingIOError:
            return
        except (OSError, FrameTooLongError):
            self.close()

    def close(self) -> None:
        """Close the connection. Messages that have arrived stay."""
        self.is_open = False
        self._socket.close()


def connect_hosts(mesh: Mesh, hosts: Sequence[Sequence[int]]) -> tuple[list[HostConnection], str]:
    """Connect the first ranks of the hosts to rank 0, and return this rank's connections. Collective.

    Args:
        mesh: The mesh of all ranks.
        hosts: The ranks of each host. The first host is rank 0's.

    Returns:
        The connections, none on ranks that are not the first of their host, and the reason why there are none on any
        rank, or "".
    """
    host = next(index for index, ranks in enumerate(hosts) if mesh.rank in ranks)
    is_first = hosts[host][0] == mesh.rank
    listening = _listen() if mesh.rank == 0 else None
    token = secrets.token_bytes(TOKEN_BYTES) if mesh.rank == 0 else b""
    own = (b"", 0, "", "")
    if listening is not None:
        own = (token, listening.getsockname()[1], _own_address(), socket.gethostname())
    data = all_gather_bytes(encode_msgpack(own), mesh=mesh)[0]
    token, port, address, name = msgspec.msgpack.decode(data, type=tuple[bytes, int, str, str])
    connections: list[HostConnection] = []
    failure = ""
    if listening is not None:
        connections = _accept(listening, token, expected=len(hosts) - 1)
        missing = set(range(1, len(hosts))) - {each.host for each in connections}
        failure = f"{len(missing)} of {len(hosts)} hosts cannot reach rank 0 at port {port}" if missing else ""
    elif is_first:
        connections = _connect([address, name], port, token, host)
    failures = [text.decode() for text in all_gather_bytes(failure.encode(), mesh=mesh)]
    if failures[0]:
        for each in connections:
            each.close()
        return [], failures[0]
    return connections, ""


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def _own_address() -> str:
    """Return this host's address on its route to the store of all ranks. "" if there is none."""
    store: Any = distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    with suppress(OSError, AttributeError):
        return interface_towards(store.host)[1]
    return ""


def _accept(listening: socket.socket, token: bytes, *, expected: int) -> list[HostConnection]:
    """Return the connections of the hosts that connect in time and know the token."""
    found: dict[int, HostConnection] = {}
    deadline = time.monotonic() + ACCEPT_SECONDS
    with listening, selectors.DefaultSelector() as selector:

        def drop(connection: socket.socket) -> None:
            selector.unregister(connection)
            connection.close()

        new_clients: NewClients[socket.socket] = NewClients(drop)
        listening.setblocking(False)
        selector.register(listening, selectors.EVENT_READ)
        while len(found) < expected and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                with suppress(OSError):
                    if key.fileobj is listening:
                        connection, _ = listening.accept()
                        # The selector reports it once the whole hello is there.
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, TOKEN_BYTES + NUMBER.size)
                        selector.register(connection, selectors.EVENT_READ)
                        new_clients.add(connection, time.monotonic())
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in new_clients:
                        _greet(key.fileobj, token, found, new_clients, drop)
        for connection in list(new_clients):
            drop(connection)
    return list(found.values())


def _greet(
    connection: socket.socket,
    token: bytes,
    found: dict[int, HostConnection],
    new_clients: NewClients[socket.socket],
    drop: Callable[[socket.socket], None],
) -> None:
    """Read what a new client has sent: add the connection of a host that knows the token to `found`."""
    size = TOKEN_BYTES + NUMBER.size
    try:
        hello = connection.recv(size, socket.MSG_DONTWAIT | socket.MSG_PEEK)
    except OSError:
        hello = b""
    new_clients.remove(connection)
    if len(hello) < size or not hmac.compare_digest(hello[:TOKEN_BYTES], token):
        drop(connection)
        return
    connection.settimeout(CONNECT_SECONDS)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    connection.recv(size)
    connection.sendall(token)
    host = NUMBER.unpack_from(hello, TOKEN_BYTES)[0]
    found[host] = HostConnection(connection, host)


def _connect(addresses: Sequence[str], port: int, token: bytes, host: int) -> list[HostConnection]:
    """Return the connection to rank 0, or nothing if none of the addresses leads there."""
    for address in filter(None, addresses):
        with suppress(OSError):
            connection = socket.create_connection((address, port), timeout=CONNECT_SECONDS)
            connection.sendall(token + NUMBER.pack(host))
            if receive_exactly(connection, TOKEN_BYTES) == token:
                return [HostConnection(connection, 0)]
            connection.close()
    return []

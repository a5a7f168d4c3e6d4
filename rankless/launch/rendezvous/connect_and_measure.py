"""Listen, connect and measure between two hosts. Both sides are the doctor's probe servers, or the agents of a job.

Note [probe secret]: a listener serves only clients that send the test's secret. The doctor's travels over ssh's
standard input, that of a job over the authenticated connections between agents. The listener reads no more bytes than
announced, and ends with the probe server or the test.
"""

import errno
import hmac
import socket
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from rankless.records.framing import receive_exactly
from rankless.records.host_connection_tests import ConnectionAttempt, ConnectionOutcome, ConnectionTarget, LinkSpeed

CONNECT_TIMEOUT_SECONDS = 2.0
SECRET_BYTES = 16
PING, FLOOD = b"P", b"F"
"""The first byte of a message: what kind of measurement it starts."""
PING_BYTES = 64
PINGS = 40
FLOOD_SECONDS = 0.3
FLOOD_BYTES = 64 << 20
STALL_TIMEOUT_SECONDS = 2.0
_BLOCK = bytes(1 << 18)
_HOST_INDEX_BYTES = 4


def start_listener(host_index: int, secret: bytes, port: int = 0, address: str = "") -> socket.socket | None:
    """Serve a socket in the background, on one address of this host or on all; return None if the port is not
    available.
    """
    both = not address and socket.has_dualstack_ipv6()
    try:
        family = socket.AF_INET6 if both or ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family, backlog=256, dualstack_ipv6=both)
    except OSError:
        return None
    threading.Thread(
        target=_accept_connections, args=(listener, host_index, secret), name="listener", daemon=True
    ).start()
    return listener


def stop_listener(listener: socket.socket) -> None:
    """Stop a listener: afterwards another socket may listen on its port."""
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # or the thread that accepts would keep it open
    listener.close()


def connect_all(
    targets: Sequence[ConnectionTarget], secret: bytes, *, timeout_seconds: float = CONNECT_TIMEOUT_SECONDS
) -> tuple[ConnectionAttempt, ...]:
    """Connect to every address of every target at once, and return the outcomes.

    Args:
        targets: Where other hosts listen.
        secret: The listeners' secret.
        timeout_seconds: How long one connection may take. Default: CONNECT_TIMEOUT_SECONDS.
    """
    with ThreadPoolExecutor(max(1, len(targets))) as pool:
        return tuple(
            attempt
            for found in pool.map(lambda target: _connect_to_addresses(target, secret, timeout_seconds), targets)
            for attempt in found
        )


def measure_link(target: ConnectionTarget, secret: bytes) -> LinkSpeed:
    """Measure the median round trip of small messages and the throughput of large ones."""
    try:
        with socket.create_connection((target.address, target.port), timeout=CONNECT_TIMEOUT_SECONDS) as connection:
            connection.settimeout(STALL_TIMEOUT_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(secret)
            _receive_exactly(connection, _HOST_INDEX_BYTES)
            round_trips = [_ping(connection) for _ in range(PINGS)]
            # The first round trips are slower: caches are cold and ARP must resolve the neighbour.
            round_trip = statistics.median(round_trips[PINGS // 4 :])
            try:
                return LinkSpeed(round_trip_seconds=round_trip, bytes_per_second=_send_flood(connection))
            except TimeoutError:
                return LinkSpeed(round_trip_seconds=round_trip, error="small messages arrive, large ones do not")
    except OSError as error:
        return LinkSpeed(error=error.strerror or str(error) or type(error).__name__)


def _connect_to_addresses(target: ConnectionTarget, secret: bytes, timeout_seconds: float) -> list[ConnectionAttempt]:
    try:
        found = socket.getaddrinfo(target.address, target.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return [ConnectionAttempt(target=target, address="", outcome="no name", text=str(error))]
    addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in found))[:4]
    with ThreadPoolExecutor(len(addresses)) as pool:
        return list(pool.map(lambda each: _connect_to_address(target, secret, timeout_seconds, *each), addresses))


def _connect_to_address(
    target: ConnectionTarget, secret: bytes, timeout_seconds: float, family: int, address: tuple[object, ...]
) -> ConnectionAttempt:
    outcome: ConnectionOutcome = "reached"
    text = ""
    is_connected = False
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_seconds)
        try:
            connection.connect(address)
            is_connected = True
            if target.has_probe:
                connection.sendall(secret)
                answered = int.from_bytes(_receive_exactly(connection, _HOST_INDEX_BYTES), "big")
                outcome = "reached" if answered == target.host_index else "another"
        except TimeoutError:
            outcome, text = ("silent", "it accepts connections but sends nothing") if is_connected else ("dropped", "")
        except OSError as error:
            outcome, text = _classify_error(error), error.strerror or str(error)
    return ConnectionAttempt(target=target, address=str(address[0]), outcome=outcome, text=text)


def _classify_error(error: OSError) -> ConnectionOutcome:
    if error.errno == errno.ECONNREFUSED:
        return "refused"
    if error.errno == errno.ETIMEDOUT:
        return "dropped"
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL):
        return "no route"
    # Some program accepted and closed the connection: it does not know the secret.
    return "another" if error.errno in (errno.ECONNRESET, errno.EPIPE, None) else "failed"


def _accept_connections(listener: socket.socket, host_index: int, secret: bytes) -> None:
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_serve_connection, args=(connection, host_index, secret), daemon=True).start()


def _serve_connection(connection: socket.socket, host_index: int, secret: bytes) -> None:
    with connection, suppress(OSError):
        connection.settimeout(CONNECT_TIMEOUT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not hmac.compare_digest(_receive_exactly(connection, SECRET_BYTES), secret):
            return
        connection.sendall(host_index.to_bytes(_HOST_INDEX_BYTES, "big"))
        while True:
            kind = connection.recv(1)
            if kind == PING:
                connection.sendall(_receive_exactly(connection, PING_BYTES - 1))
            elif kind == FLOOD:
                _receive_flood(connection)
            else:
                return


def _ping(connection: socket.socket) -> float:
    start = time.perf_counter()
    connection.sendall(PING + bytes(PING_BYTES - 1))
    _receive_exactly(connection, PING_BYTES - 1)
    return time.perf_counter() - start


def _send_flood(connection: socket.socket) -> float:
    """Return the throughput in bytes per second until the other side confirms all data.

    Raises:
        TimeoutError: If the data stalls.
    """
    start = time.perf_counter()
    connection.sendall(FLOOD)
    sent = 0
    while sent < FLOOD_BYTES and time.perf_counter() - start < FLOOD_SECONDS:
        connection.sendall(len(_BLOCK).to_bytes(4, "big"))
        connection.sendall(_BLOCK)
        sent += len(_BLOCK)
    connection.sendall(bytes(4))
    _receive_exactly(connection, 1)
    return sent / (time.perf_counter() - start)


def _receive_flood(connection: socket.socket) -> None:
    buffer = memoryview(bytearray(len(_BLOCK)))
    while length := int.from_bytes(_receive_exactly(connection, 4), "big"):
        while length:
            received = connection.recv_into(buffer, min(length, len(buffer)))
            if not received:
                raise ConnectionError("closed")
            length -= received
    connection.sendall(b"E")


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    data = receive_exactly(connection, count)
    if data is None:
        raise ConnectionError("closed")
    return data

"""Between two hosts: listening, connecting, and measuring the way. Both sides are the doctor's own.

Note [who may talk]: a listener answers only to who sends the doctor's secret, which travels by ssh's standard input;
it reads no more than it counts, and ends with the program.
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

from rankless.launch.doctor.probe_protocol import Attempt, Outcome, Speed, Target

CONNECT_SECONDS = 2.0
SECRET_BYTES = 16
PING, FLOOD = b"P", b"F"
PING_BYTES = 64
PINGS = 40
FLOOD_SECONDS = 0.3
FLOOD_BYTES = 64 << 20
STALLED_SECONDS = 2.0
_BLOCK = bytes(1 << 18)
_PLACE_BYTES = 4


def listen(place: int, secret: bytes, port: int = 0, address: str = "") -> socket.socket | None:
    """A socket on one address of this host, or on all, served in the background; None where it cannot be had."""
    both = not address and socket.has_dualstack_ipv6()
    try:
        family = socket.AF_INET6 if both or ":" in address else socket.AF_INET
        listening = socket.create_server((address, port), family=family, backlog=256, dualstack_ipv6=both)
    except OSError:
        return None
    threading.Thread(target=_accept, args=(listening, place, secret), name="listener", daemon=True).start()
    return listening


def connect_all(targets: Sequence[Target], secret: bytes) -> tuple[Attempt, ...]:
    """Whether each target is reached, by each of its addresses; all at once."""
    with ThreadPoolExecutor(max(1, len(targets))) as pool:
        return tuple(
            attempt for found in pool.map(lambda target: _attempts(target, secret), targets) for attempt in found
        )


def measure(target: Target, secret: bytes) -> Speed:
    """The median round trip of small messages, and the speed of a flood."""
    try:
        with socket.create_connection((target.address, target.port), timeout=CONNECT_SECONDS) as connection:
            connection.settimeout(STALLED_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(secret)
            _exactly(connection, _PLACE_BYTES)
            trips = [_ping(connection) for _ in range(PINGS)]
            # The first are slower: caches, and neighbours to be found.
            trip = statistics.median(trips[PINGS // 4 :])
            try:
                return Speed(round_trip_seconds=trip, bytes_per_second=_flood(connection))
            except TimeoutError:
                return Speed(round_trip_seconds=trip, error="small messages arrive, large ones do not")
    except OSError as error:
        return Speed(error=error.strerror or str(error) or type(error).__name__)


def _attempts(target: Target, secret: bytes) -> list[Attempt]:
    try:
        found = socket.getaddrinfo(target.address, target.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return [Attempt(target=target, address="", outcome="no name", text=str(error))]
    places = list(dict.fromkeys((family, place) for family, _, _, _, place in found))[:4]
    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(lambda each: _attempt(target, secret, *each), places))


def _attempt(target: Target, secret: bytes, family: int, place: tuple[object, ...]) -> Attempt:
    outcome: Outcome
    text = ""
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(CONNECT_SECONDS)
        try:
            connection.connect(place)
            connection.sendall(secret)
            answered = int.from_bytes(_exactly(connection, _PLACE_BYTES), "big")
            outcome = "reached" if answered == target.place else "another"
        except TimeoutError:
            outcome = "dropped"
        except OSError as error:
            outcome, text = _outcome(error), error.strerror or str(error)
    return Attempt(target=target, address=str(place[0]), outcome=outcome, text=text)


def _outcome(error: OSError) -> Outcome:
    if error.errno == errno.ECONNREFUSED:
        return "refused"
    if error.errno == errno.ETIMEDOUT:
        return "dropped"
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL):
        return "no way"
    # Somebody was there, and closed: he does not know the secret.
    return "another" if error.errno in (errno.ECONNRESET, errno.EPIPE, None) else "failed"


def _accept(listening: socket.socket, place: int, secret: bytes) -> None:
    with suppress(OSError):
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=_serve, args=(connection, place, secret), daemon=True).start()


def _serve(connection: socket.socket, place: int, secret: bytes) -> None:
    with connection, suppress(OSError):
        connection.settimeout(CONNECT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not hmac.compare_digest(_exactly(connection, SECRET_BYTES), secret):
            return
        connection.sendall(place.to_bytes(_PLACE_BYTES, "big"))
        while True:
            kind = connection.recv(1)
            if kind == PING:
                connection.sendall(_exactly(connection, PING_BYTES - 1))
            elif kind == FLOOD:
                _swallow(connection)
            else:
                return


def _ping(connection: socket.socket) -> float:
    start = time.perf_counter()
    connection.sendall(PING + bytes(PING_BYTES - 1))
    _exactly(connection, PING_BYTES - 1)
    return time.perf_counter() - start


def _flood(connection: socket.socket) -> float:
    """Bytes a second, until the other side has said that it has them all. Raises TimeoutError if they stall."""
    start = time.perf_counter()
    connection.sendall(FLOOD)
    sent = 0
    while sent < FLOOD_BYTES and time.perf_counter() - start < FLOOD_SECONDS:
        connection.sendall(len(_BLOCK).to_bytes(4, "big"))
        connection.sendall(_BLOCK)
        sent += len(_BLOCK)
    connection.sendall(bytes(4))
    _exactly(connection, 1)
    return sent / (time.perf_counter() - start)


def _swallow(connection: socket.socket) -> None:
    room = memoryview(bytearray(len(_BLOCK)))
    while length := int.from_bytes(_exactly(connection, 4), "big"):
        while length:
            taken = connection.recv_into(room, min(length, len(room)))
            if not taken:
                raise ConnectionError("closed")
            length -= taken
    connection.sendall(b"E")


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionError("closed")
        data += more
    return data

"""Horovod's HTTP key-value server, for the Gloo rendezvous of an installed Horovod's ranks.

Without it, an installed Horovod starts as rank 0 of 1 in every worker, without a warning. Rankless's own ranks do not
need it.

The server answers PUT, GET and DELETE of /scope/key. A scope is one rendezvous: each rank puts its address under its
number, waits until GET of the others' no longer returns 404, and deletes its own when all are connected. With the last
number the server deletes the whole scope (Gloo also leaves names of hosts there), so that it may be used again.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

LONGEST_VALUE_BYTES = 16 << 20
"""A rank's addresses for a thousand other ranks take 100 KB."""
REQUEST_SECONDS = 10.0


class KeyValues:
    """The values by scope and key. Safe for threads."""

    def __init__(self) -> None:
        self._scopes: dict[str, dict[str, bytes]] = {}
        self._lock = threading.Lock()

    def put(self, scope: str, key: str, value: bytes) -> None:
        """Store a value, and replace an older one."""
        with self._lock:
            self._scopes.setdefault(scope, {})[key] = value

    def get(self, scope: str, key: str) -> bytes | None:
        """Return the value, or None."""
        with self._lock:
            return self._scopes.get(scope, {}).get(key)

    def delete(self, scope: str, key: str) -> None:
        """Delete a value, and the whole scope with the last rank's value."""
        with self._lock:
            values = self._scopes.get(scope, {})
            values.pop(key, None)
            if not values or (key.isdigit() and not any(map(str.isdigit, values))):
                self._scopes.pop(scope, None)


@contextlib.contextmanager
def rendezvous_server(address: str) -> Iterator[int]:
    """Run the server on an address of this host; yield its port."""
    server = _Server((address, 0), _Request)
    thread = threading.Thread(target=server.serve_forever, name="rendezvous server", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which otherwise checks twice a second
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], request: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.values = KeyValues()
        super().__init__(address, request)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's asks a name server for this host's name

    def handle_error(self, _request: Any, _client: Any) -> None:
        """Ignore a client that disconnects: ranks may end at any time."""


class _Request(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:
        if (scope_and_key := self._parse_path()) is not None:
            value = self.server.values.get(*scope_and_key)
            self._answer(HTTPStatus.NOT_FOUND if value is None else HTTPStatus.OK, value or b"")

    def do_PUT(self) -> None:
        if (scope_and_key := self._parse_path()) is None:
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdigit():
            self._answer(HTTPStatus.LENGTH_REQUIRED)
        elif int(length) > LONGEST_VALUE_BYTES:
            self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        elif len(value := self.rfile.read(int(length))) == int(length):
            self.server.values.put(*scope_and_key, value)
            self._answer(HTTPStatus.OK)

    def do_DELETE(self) -> None:
        if (scope_and_key := self._parse_path()) is not None:
            self.server.values.delete(*scope_and_key)
            self._answer(HTTPStatus.OK)

    def log_message(self, *_: Any) -> None:
        """Log nothing: each rank sends a hundred requests a second while it waits."""

    def _parse_path(self) -> tuple[str, str] | None:
        """Return scope and key of the path; answer and return None for an invalid path."""
        match self.path.split("/"):
            case ["", scope, key] if scope and key:
                return scope, key
        self._answer(HTTPStatus.BAD_REQUEST)
        return None

    def _answer(self, status: HTTPStatus, value: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value)

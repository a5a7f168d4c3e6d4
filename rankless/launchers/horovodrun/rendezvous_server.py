"""Horovod's HTTP key-value server: at it the ranks of a real Horovod find each other by Gloo.

Without it, a real Horovod comes up as rank 0 of 1 in every worker, and says nothing. Rankless's own ranks meet without.

PUT, GET and DELETE of /scope/key. A scope is one meeting: each rank puts its address under its number, waits until
those of the others are no longer answered by 404, and deletes its own when all are connected. When the last number
is gone, so is all else in the scope (Gloo also leaves names of hosts there), and the scope may serve another meeting.
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
"""A rank's addresses for a thousand others have 100 KB."""
REQUEST_SECONDS = 10.0


class KeyValues:
    """What has been put, by scope and key. For many threads."""

    def __init__(self) -> None:
        self._scopes: dict[str, dict[str, bytes]] = {}
        self._lock = threading.Lock()

    def put(self, scope: str, key: str, value: bytes) -> None:
        """Keep a value, in the place of an older one."""
        with self._lock:
            self._scopes.setdefault(scope, {})[key] = value

    def get(self, scope: str, key: str) -> bytes | None:
        """The value, or None if there is none."""
        with self._lock:
            return self._scopes.get(scope, {}).get(key)

    def delete(self, scope: str, key: str) -> None:
        """Forget a value, and the whole scope with its last rank's."""
        with self._lock:
            values = self._scopes.get(scope, {})
            values.pop(key, None)
            if not values or (key.isdigit() and not any(map(str.isdigit, values))):
                self._scopes.pop(scope, None)


@contextlib.contextmanager
def rendezvous_server(address: str) -> Iterator[int]:
    """The port at which the server listens on that address of this host, while the context is entered."""
    server = _Server((address, 0), _Request)
    thread = threading.Thread(target=server.serve_forever, name="rendezvous server", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which would look up each half second only
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
        """A client that goes while it is answered is no news: ranks may end at any time."""


class _Request(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:
        if (place := self._place()) is not None:
            value = self.server.values.get(*place)
            self._answer(HTTPStatus.NOT_FOUND if value is None else HTTPStatus.OK, value or b"")

    def do_PUT(self) -> None:
        if (place := self._place()) is None:
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdigit():
            self._answer(HTTPStatus.LENGTH_REQUIRED)
        elif int(length) > LONGEST_VALUE_BYTES:
            self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        elif len(value := self.rfile.read(int(length))) == int(length):
            self.server.values.put(*place, value)
            self._answer(HTTPStatus.OK)

    def do_DELETE(self) -> None:
        if (place := self._place()) is not None:
            self.server.values.delete(*place)
            self._answer(HTTPStatus.OK)

    def log_message(self, *_: Any) -> None:
        """Nothing: each rank asks a hundred times a second while it waits."""

    def _place(self) -> tuple[str, str] | None:
        """Scope and key; None, and an answer, for another path."""
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

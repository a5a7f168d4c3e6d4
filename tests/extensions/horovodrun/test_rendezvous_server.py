"""The server at which a real Horovod's ranks find each other: what it answers, and that it ends."""

import contextlib
import socket
from collections.abc import Iterator
from http.client import HTTPConnection

import pytest

from rankless.extensions.horovodrun.rendezvous_server import LONGEST_VALUE_BYTES, KeyValues, rendezvous_server


@pytest.fixture
def port() -> Iterator[int]:
    with rendezvous_server("127.0.0.1") as found:
        yield found


def asked(port: int, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_get_returns_what_put_stores_by_scope_and_key(port: int):
    assert asked(port, "GET", "/global/0") == (404, b"")
    every_byte = bytes(range(256)) * 300
    assert asked(port, "PUT", "/global/0", every_byte) == (200, b"")
    assert asked(port, "GET", "/global/0") == (200, every_byte)
    assert asked(port, "GET", "/local_a/0") == (404, b"")
    assert asked(port, "PUT", "/global/0", b"") == (200, b"")
    assert asked(port, "GET", "/global/0") == (200, b"")


def test_a_scope_is_empty_once_the_last_rank_has_left_it(port: int):
    for key in ("rank_0", "0", "rank_1", "1"):
        asked(port, "PUT", f"/global/{key}", b"x")
    assert asked(port, "DELETE", "/global/0") == (200, b"")
    assert [asked(port, "GET", f"/global/{key}")[0] for key in ("0", "1", "rank_0")] == [404, 200, 200]
    asked(port, "DELETE", "/global/1")
    assert [asked(port, "GET", f"/global/{key}")[0] for key in ("1", "rank_0", "rank_1")] == [404] * 3
    assert asked(port, "DELETE", "/never/0") == (200, b"")


def test_deleting_a_key_other_than_a_ranks_deletes_nothing_else():
    values = KeyValues()
    values.put("mine", "a", b"1")
    values.put("mine", "b", b"2")
    values.delete("mine", "a")
    assert (values.get("mine", "a"), values.get("mine", "b")) == (None, b"2")


def test_a_path_other_than_scope_and_key_is_rejected(port: int):
    for method in ("GET", "PUT", "DELETE"):
        for path in ("/", "/global", "/global/", "//0", "/a/b/c"):
            assert asked(port, method, path)[0] == 400
    assert asked(port, "POST", "/global/0")[0] == 501
    assert asked(port, "PUT", "/global/0", **{"Content-Length": str(LONGEST_VALUE_BYTES + 1)})[0] == 413
    assert asked(port, "PUT", "/global/0", **{"Content-Length": "-1"})[0] == 411


def test_an_incomplete_value_is_not_stored_and_nothing_is_logged(port: int, capfd: pytest.CaptureFixture[str]):
    with socket.create_connection(("127.0.0.1", port), timeout=20) as half:
        half.sendall(b"PUT /global/0 HTTP/1.1\r\nContent-Length: 10\r\n\r\nhalf")
        half.shutdown(socket.SHUT_WR)
        assert half.recv(1) == b""
    assert asked(port, "GET", "/global/0")[0] == 404
    assert capfd.readouterr() == ("", "")


def test_it_listens_on_its_address_only_and_ends():
    with rendezvous_server("127.0.0.2") as found:
        with pytest.raises(ConnectionRefusedError):  # no other process listens at this address, unlike 127.0.0.1
            socket.create_connection(("127.0.0.3", found), timeout=20)
        socket.create_connection(("127.0.0.2", found), timeout=20).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", found), timeout=20)

"""`cut_connections` closes the connections between ranks, and no others."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from rankless.runtime.release_waiting_ranks import cut_connections

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="cut_connections needs Linux's pidfd_getfd")

CLIENT = """
import socket, sys
connections = [socket.create_connection(("127.0.0.1", int(port)), timeout=20) for port in sys.argv[1:]]
print("connected", flush=True)
print([connection.recv(1) for connection in connections], flush=True)
"""
SERVER = """
import socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
connection.settimeout(20)
print("accepted", flush=True)
print([connection.recv(1)], flush=True)
"""
PARENT = """
import os, socket
server = socket.create_server(("127.0.0.1", 0))
if os.fork() == 0:
    connection, _ = server.accept()
    connection.settimeout(20)
    connection.sendall(connection.recv(1))
    os._exit(0)
connection = socket.create_connection(server.getsockname(), timeout=20)
print("connected", flush=True)
input()
connection.sendall(b"x")
print(connection.recv(1), flush=True)
"""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, code: str, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *words]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.callback(process.communicate)
    stack.callback(process.kill)
    return process


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_connections_between_ranks_close_and_others_stay_open(stack: ExitStack) -> None:
    database = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    server = start(stack, SERVER)
    port = read_line(server)
    client = start(stack, CLIENT, port, str(database.getsockname()[1]))
    accepted = stack.enter_context(database.accept()[0])
    assert (read_line(client), read_line(server)) == ("connected", "accepted")
    cut_connections({client.pid: 0, server.pid: 1}, hosts=())
    assert read_line(server) == "[b'']"
    accepted.sendall(b"x")
    assert read_line(client) == "[b'', b'x']"


def test_connections_to_another_host_of_the_job_close(stack: ExitStack) -> None:
    other = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    client = start(stack, CLIENT, str(other.getsockname()[1]))
    accepted = stack.enter_context(other.accept()[0])
    assert read_line(client) == "connected"
    cut_connections({client.pid: 0}, hosts=["127.0.0.1"])
    assert read_line(client) == "[b'']"
    accepted.settimeout(20)
    assert accepted.recv(1) == b""


def test_a_connection_to_a_child_of_the_same_rank_stays_open(stack: ExitStack) -> None:
    parent = start(stack, PARENT)
    assert read_line(parent) == "connected"
    cut_connections({parent.pid: 0}, hosts=())
    assert parent.stdin is not None
    parent.stdin.write("go on\n")
    parent.stdin.flush()
    assert read_line(parent) == "b'x'"


def test_processes_that_have_ended_are_ignored(stack: ExitStack) -> None:
    ended = start(stack, "pass")
    ended.wait()
    cut_connections({ended.pid: 0}, hosts=["127.0.0.1"])

"""Cutting the connections between processes, and no others."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from rankless.runtime.connections import cut_connections

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="connections are cut by Linux's pidfd_getfd")

TALKER = """
import socket, sys
connections = [socket.create_connection(("127.0.0.1", int(port)), timeout=20) for port in sys.argv[1:]]
print("connected", flush=True)
print([connection.recv(1) for connection in connections], flush=True)
"""
LISTENER = """
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


def started(stack: ExitStack, code: str, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *words]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.callback(process.communicate)
    stack.callback(process.kill)
    return process


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_ranks_lose_each_other_and_keep_their_connections_to_others(stack: ExitStack) -> None:
    database = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    listener = started(stack, LISTENER)
    port = line_of(listener)
    talker = started(stack, TALKER, port, str(database.getsockname()[1]))
    accepted = stack.enter_context(database.accept()[0])
    assert (line_of(talker), line_of(listener)) == ("connected", "accepted")
    cut_connections({talker.pid: 0, listener.pid: 1}, hosts=())
    assert line_of(listener) == "[b'']"
    accepted.sendall(b"x")
    assert line_of(talker) == "[b'', b'x']"


def test_connections_to_another_host_of_the_job_are_cut(stack: ExitStack) -> None:
    other = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    talker = started(stack, TALKER, str(other.getsockname()[1]))
    accepted = stack.enter_context(other.accept()[0])
    assert line_of(talker) == "connected"
    cut_connections({talker.pid: 0}, hosts=["127.0.0.1"])
    assert line_of(talker) == "[b'']"
    accepted.settimeout(20)
    assert accepted.recv(1) == b""


def test_a_rank_keeps_the_connection_to_a_process_of_its_own(stack: ExitStack) -> None:
    parent = started(stack, PARENT)
    assert line_of(parent) == "connected"
    cut_connections({parent.pid: 0}, hosts=())
    assert parent.stdin is not None
    parent.stdin.write("go on\n")
    parent.stdin.flush()
    assert line_of(parent) == "b'x'"


def test_processes_that_are_gone_are_passed_over(stack: ExitStack) -> None:
    gone = started(stack, "pass")
    gone.wait()
    cut_connections({gone.pid: 0}, hosts=["127.0.0.1"])

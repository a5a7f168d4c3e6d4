"""Measures pulls and pushes of a worker at a table server, and at a bare socket server with the same table, in turns.

The bare server speaks over a Unix or TCP socket, without authentication, numbers, transactions or several workers. All
servers run in processes of their own. --peer compares with another one than the bare: see table_peers. A push of ours
includes the commit. Writes the seconds of ours and of the peer to the files pull.json and push.json of the working
folder. With --durable, our server keeps its tables in memory that outlives it, as in a run. With --encrypted, what we
send is encrypted.
"""

import argparse
import contextlib
import importlib
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from bench.pairs import measure
from rankless.extensions.servers.config import ServerConfig, ServersConfig, server_environment
from rankless.extensions.servers.service.client import ServerClient
from rankless.extensions.servers.tables.id_map import find_distinct
from rankless.extensions.servers.tables.optimizers import SgdSettings
from rankless.extensions.servers.tables.settings import TableSettings
from rankless.extensions.servers.tables.table import Table

SIZE = (4096, 16)
ROWS = 400_000
PAIRS = 9
HEADER = struct.Struct("<BQ")
PULL, PUSH = 0, 1
SGD = SgdSettings(lr=0.1)


def receive_into(connection: socket.socket, array: np.ndarray) -> np.ndarray:
    view = memoryview(array).cast("B")
    while view.nbytes:
        view = view[connection.recv_into(view) or sys.exit(0) :]
    return array


def serve_bare(connection: socket.socket, dim: int) -> None:
    """Serve one connection until it is closed."""
    table = Table(TableSettings(dim=dim))
    while True:
        header = receive_into(connection, np.empty(HEADER.size, np.uint8))
        kind, count = HEADER.unpack(header.tobytes())
        ids = receive_into(connection, np.empty(count, np.int64))
        if kind == PULL:
            connection.sendall(memoryview(table.pull(ids)).cast("B"))
            continue
        occurrences = receive_into(connection, np.empty(count, np.int64))
        gradients = receive_into(connection, np.empty((count, dim), np.float32))
        find_distinct(ids)
        table.push(ids, occurrences, gradients, SGD)
        connection.sendall(b"\1")


class PeerTable(Protocol):
    """A table at another server."""

    def pull(self, ids: np.ndarray) -> np.ndarray:
        """Return rows, float32, of shape (n, dim)."""

    def push(self, ids: np.ndarray, occurrences: np.ndarray, gradients: np.ndarray) -> None:
        """Make a step."""


class BareTable:
    """A table at the bare server."""

    def __init__(self, connection: socket.socket, dim: int) -> None:
        self._connection, self._dim = connection, dim

    def pull(self, ids: np.ndarray) -> np.ndarray:
        self._connection.sendall(HEADER.pack(PULL, len(ids)))
        self._connection.sendall(memoryview(ids).cast("B"))
        return receive_into(self._connection, np.empty((len(ids), self._dim), np.float32))

    def push(self, ids: np.ndarray, occurrences: np.ndarray, gradients: np.ndarray) -> None:
        self._connection.sendall(HEADER.pack(PUSH, len(ids)))
        for array in (ids, occurrences, gradients):
            self._connection.sendall(memoryview(array).cast("B"))
        receive_into(self._connection, np.empty(1, np.uint8))


@contextlib.contextmanager
def bare_server(folder: str, dim: int, *, tcp: bool) -> Iterator[BareTable]:
    family, address = (socket.AF_INET, ("127.0.0.1", 0)) if tcp else (socket.AF_UNIX, f"{folder}/bare")
    with socket.socket(family) as listener:
        listener.bind(address)
        listener.listen()
        arguments = ["--serve", str(listener.fileno()), str(dim)]
        environment = os.environ | {"NUMBA_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, __file__, *arguments], pass_fds=[listener.fileno()], env=environment
        )
        with socket.socket(family) as connection:
            connection.connect(listener.getsockname())
            if tcp:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield BareTable(connection, dim)
        process.wait()


@contextlib.contextmanager
def table_server(folder: str, *, tcp: bool, durable: bool, encrypted: bool) -> Iterator[ServerClient]:
    reading, writing = os.pipe()
    memory = os.memfd_create("tables") if durable else None
    passed = [writing] if memory is None else [writing, memory]
    address, token = "tcp://127.0.0.1:0" if tcp else f"ipc://{folder}/server", secrets.token_hex()
    config = ServerConfig(
        index=0,
        server_count=1,
        worker_count=1,
        address=address,
        token=token,
        run_id="bench",
        encrypted=encrypted,
        ready_descriptor=writing,
        memory_descriptor=memory,
    )
    command = [sys.executable, "-m", "rankless.extensions.servers.service.process"]
    process = subprocess.Popen(command, env=server_environment(config), pass_fds=passed, stderr=subprocess.DEVNULL)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        address = pipe.readline().split()[1]
    servers = ServersConfig(addresses=(address,), token=token, encrypted=encrypted)
    with ServerClient(servers, worker=0, worker_count=1) as client:
        yield client
    process.terminate()
    process.wait()


def seconds_per_call(call: Callable[[], object], finish: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    finish()
    return (time.perf_counter() - start) / calls


def peer_server(kind: str, folder: str, dim: int, *, tcp: bool) -> contextlib.AbstractContextManager[PeerTable]:
    if kind == "bare":
        return bare_server(folder, dim, tcp=tcp)
    peers = importlib.import_module("bench.scripts.table_peers")  # with torch and grpc, which a server does not import
    return peers.rpc_server(ROWS, dim) if kind == "torch_rpc" else peers.grpc_server(dim)


def measure_size(ids_count: int, dim: int, *, peer: str, tcp: bool, durable: bool, encrypted: bool) -> None:
    generator = np.random.default_rng(0)
    with (
        tempfile.TemporaryDirectory() as folder,
        peer_server(peer, folder, dim, tcp=tcp) as bare,
        table_server(folder, tcp=tcp, durable=durable, encrypted=encrypted) as client,
    ):
        table = client.open_table("bench", TableSettings(dim=dim))
        for ids in np.arange(ROWS).reshape(8, -1):  # so that all rows exist
            gradients = np.ones((len(ids), dim), np.float32)
            bare.push(ids, np.ones(len(ids), np.int64), gradients)
            table.push(ids, np.ones(len(ids), np.int64), gradients, SGD)
            client.commit()
        batches = [generator.choice(ROWS, ids_count, replace=False) for _ in range(8)]
        gradients = generator.normal(size=(ids_count, dim)).astype(np.float32)
        occurrences, state = np.ones(ids_count, np.int64), {"next": 0}

        def batch() -> np.ndarray:
            state["next"] += 1
            return batches[state["next"] % len(batches)]

        def push() -> None:
            table.push(batch(), occurrences, gradients, SGD)
            client.commit()

        calls = {
            "pull": (lambda: table.pull(batch()), lambda: bare.pull(batch())),
            "push": (push, lambda: bare.push(batch(), occurrences, gradients)),
        }
        one = np.zeros(1, np.int64)
        count = max(8, 400_000 // ids_count)
        for part, (ours, theirs) in calls.items():
            times = measure(
                lambda ours=ours: seconds_per_call(ours, lambda: table.pull(one), count),
                lambda theirs=theirs: seconds_per_call(theirs, lambda: bare.pull(one), count),
                pairs=PAIRS,
            )
            Path(f"{part}.json").write_text(json.dumps(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", nargs=2, type=int, metavar=("DESCRIPTOR", "DIM"), help="be the bare server")
    parser.add_argument("--size", nargs=2, type=int, default=SIZE, metavar=("IDS", "DIM"))
    parser.add_argument("--tcp", action="store_true")
    parser.add_argument("--durable", action="store_true")
    parser.add_argument("--encrypted", action="store_true")
    parser.add_argument("--peer", choices=["bare", "torch_rpc", "grpc"], default="bare")
    arguments = parser.parse_args()
    if arguments.serve:
        with socket.socket(fileno=arguments.serve[0]) as listener:
            connection, _ = listener.accept()
            with connection:
                serve_bare(connection, arguments.serve[1])
        return
    options = {name: getattr(arguments, name) for name in ("peer", "tcp", "durable", "encrypted")}
    measure_size(*arguments.size, **options)


if __name__ == "__main__":
    main()

"""Peers of a table server: an RPC server of PyTorch with a dense matrix, and a gRPC server with the same table as ours.

Both run in processes of their own, without durability. PyTorch's has one row for each id from 0 up, so it looks up
nothing, and steps by `index_add_`. gRPC sends raw arrays as bytes, without protocol buffers.
"""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import torch
from torch.distributed import rpc

from rankless.extensions.servers.tables.id_map import find_distinct
from rankless.extensions.servers.tables.optimizers import SgdSettings
from rankless.extensions.servers.tables.settings import TableSettings
from rankless.extensions.servers.tables.table import Table

SGD = SgdSettings(lr=0.1)
OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
SERVE = (sys.executable, "-c", "from bench.scripts.table_peers import main; main()")
"""Not as `__main__`: RPC finds functions by the name of their module."""
MATRIX: list[torch.Tensor] = []
"""Of the RPC server's process."""


def pull_rows(ids: torch.Tensor) -> torch.Tensor:
    return MATRIX[0][ids]


def push_rows(ids: torch.Tensor, gradients: torch.Tensor) -> None:
    MATRIX[0].index_add_(0, ids, gradients, alpha=-SGD.lr)


def join_rpc(name: str, rank: int, port: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=2, init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


def serve_rpc(port: int, rows: int, dim: int) -> None:
    MATRIX.append(torch.zeros(rows, dim))
    join_rpc("server", 0, port)
    rpc.shutdown()  # once the worker shuts down, too


def serve_grpc(dim: int) -> None:
    """Serve until standard input ends, at a port that is written to standard output."""
    table = Table(TableSettings(dim=dim))

    def pull(request: bytes, _: grpc.ServicerContext) -> bytes:
        return table.pull(np.frombuffer(request, np.int64)).tobytes()

    def push(request: bytes, _: grpc.ServicerContext) -> bytes:
        count = len(request) // (16 + 4 * dim)
        ids, occurrences = np.frombuffer(request, np.int64, 2 * count).reshape(2, count)
        gradients = np.frombuffer(request, np.float32, offset=16 * count).reshape(count, dim)
        find_distinct(ids)
        table.push(ids, occurrences, gradients, SGD)
        return b""

    methods = {name: grpc.unary_unary_rpc_method_handler(call) for name, call in (("pull", pull), ("push", push))}
    server = grpc.server(ThreadPoolExecutor(1), options=OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("table", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    sys.stdin.read()
    server.stop(None)


class RpcTable:
    """A matrix at the RPC server."""

    def pull(self, ids: np.ndarray) -> np.ndarray:
        return rpc.rpc_sync("server", pull_rows, (torch.from_numpy(ids),)).numpy()

    def push(self, ids: np.ndarray, _occurrences: np.ndarray, gradients: np.ndarray) -> None:
        rpc.rpc_sync("server", push_rows, (torch.from_numpy(ids), torch.from_numpy(gradients)))


class GrpcTable:
    """A table at the gRPC server."""

    def __init__(self, channel: grpc.Channel, dim: int) -> None:
        self._pull, self._push = channel.unary_unary("/table/pull"), channel.unary_unary("/table/push")
        self._dim = dim

    def pull(self, ids: np.ndarray) -> np.ndarray:
        return np.frombuffer(self._pull(ids.tobytes()), np.float32).reshape(len(ids), self._dim)

    def push(self, ids: np.ndarray, occurrences: np.ndarray, gradients: np.ndarray) -> None:
        self._push(b"".join((ids.tobytes(), occurrences.tobytes(), gradients.tobytes())))


@contextlib.contextmanager
def rpc_server(rows: int, dim: int) -> Iterator[RpcTable]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    with subprocess.Popen([*SERVE, "rpc", *map(str, (port, rows, dim))]):
        join_rpc("worker", 1, port)
        yield RpcTable()
        rpc.shutdown()


@contextlib.contextmanager
def grpc_server(dim: int) -> Iterator[GrpcTable]:
    command = [*SERVE, "grpc", str(dim)]
    environment = os.environ | {"NUMBA_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
            yield GrpcTable(channel, dim)
        process.stdin.close()


def main() -> None:
    torch.set_num_threads(1)
    kind, *numbers = sys.argv[1:]
    if kind == "rpc":
        serve_rpc(*map(int, numbers))
    else:
        serve_grpc(*map(int, numbers))

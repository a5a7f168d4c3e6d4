"""A table server against other servers with the same rows: one worker, one server.

- A bare socket server with the same table, over Unix sockets and TCP. It has no authentication, no numbered requests,
  no transactions, and one client. With `durable`, ours keeps its tables in memory that outlives it, as in a run; the
  bare one never does. With `encrypted`, what ours sends is encrypted.
- PyTorch's RPC with a dense matrix, which needs no lookup, and `index_add_`.
- gRPC with the same table, and raw arrays as bytes.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.commands import SCRIPTS, run
from bench.pairs import Row, make_row

AIMS = {
    **{(kind, part, 65536): 1 / 0.8 for kind in ("unix", "tcp", "unix_durable") for part in ("pull", "push")},
    ("torch_rpc", "pull", 4096): 1 / 1.5,
    ("torch_rpc", "pull", 65536): 1 / 1.2,
    ("torch_rpc", "push", 65536): 1 / 3,
}
"""Our time divided by the peer's, by kind, part and number of ids."""
SIZES = ((4096, 16), (65536, 64))
KINDS = {
    "unix": ("a bare socket", ()),
    "tcp": ("a bare socket", ("--tcp",)),
    "unix_durable": ("a bare socket", ("--durable",)),
    "tcp_encrypted": ("a bare socket", ("--tcp", "--encrypted")),
    "torch_rpc": ("torch RPC", ("--peer", "torch_rpc")),
    "grpc": ("gRPC", ("--peer", "grpc")),
}


def rows() -> Iterator[Row]:
    """Yield one row per number of ids and elements of a row, kind of server, and part: pull, or push with commit."""
    for ids, dim in SIZES:
        for kind, (peer, options) in KINDS.items():
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, str(SCRIPTS / "table_servers.py"), "--size", str(ids), str(dim), *options]
                run(command, threads=1, folder=folder)
                for part in ("pull", "push"):
                    times = json.loads((Path(folder) / f"{part}.json").read_text())
                    aim = AIMS.get((kind, part, ids))
                    yield make_row(f"table_server_{part}_{ids}x{dim}_{kind}", peer=peer, times=times, aim=aim)

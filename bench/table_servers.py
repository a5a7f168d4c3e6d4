"""A table server against a bare socket server with the same table: one worker, one server, Unix sockets and TCP.

The bare server has no authentication, no numbered requests, no transactions, and one client. With `durable`, ours keeps
its tables in memory that outlives it, as in a run; the bare one never does.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.commands import SCRIPTS, run
from bench.pairs import Row, make_row

AIMS = {4096: None, 65536: 1.25}
"""0.8 x the speed of the bare server, by number of ids."""
SIZES = ((4096, 16), (65536, 64))
KINDS = {"unix": (), "tcp": ("--tcp",), "unix_durable": ("--durable",)}


def rows() -> Iterator[Row]:
    """Yield one row per number of ids and elements of a row, kind of server, and part: pull, or push with commit."""
    for ids, dim in SIZES:
        for kind, options in KINDS.items():
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, str(SCRIPTS / "table_servers.py"), "--size", str(ids), str(dim), *options]
                run(command, threads=1, folder=folder)
                for part in ("pull", "push"):
                    times = json.loads((Path(folder) / f"{part}.json").read_text())
                    yield make_row(
                        f"table_server_{part}_{ids}x{dim}_{kind}", peer="a bare socket", times=times, aim=AIMS[ids]
                    )

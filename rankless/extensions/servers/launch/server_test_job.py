"""The doctor's test of parameter servers: a server makes a step, is killed, and continues in a new process.

It prints how long both took. Its argument is a folder for the server's socket and log.
"""

import os
import secrets
import signal
import sys
import time
from pathlib import Path

import numpy as np

from rankless.errors import RanklessError, TableError
from rankless.extensions.servers.config import ServerConfig, ServersConfig
from rankless.extensions.servers.launch.processes import ServerProcesses
from rankless.extensions.servers.launch.server_process import ServerLaunch
from rankless.extensions.servers.service.client import ServerClient
from rankless.extensions.servers.service.server_connection import ConnectionSettings
from rankless.extensions.servers.tables.optimizers import SgdSettings
from rankless.extensions.servers.tables.settings import Constant, TableSettings
from rankless.launch.signal_reader import Interrupts
from rankless.records.number_formatting import format_seconds

RESTART_SECONDS = 120.0


def main() -> int:
    """Run the test, and return the exit code. The last line of the output says what was found."""
    try:
        with Interrupts() as interrupts:
            print(run_test(Path(sys.argv[1]), interrupts))
    except RanklessError as error:
        first, *more = str(error.found).strip().splitlines()  # the end of a log may follow
        print(f"the server: {first} {more[-1].strip()}" if more else f"the server: {first}")
        return 1
    return 0


def run_test(folder: Path, interrupts: Interrupts) -> str:
    """Start a server, kill it after a step, and return what was measured. Raises errors of Rankless."""
    config = ServerConfig(
        index=0,
        server_count=1,
        worker_count=1,
        address=f"ipc://{folder}/server",
        token=secrets.token_hex(16),
        run_id="doctor",
    )
    servers = ServerProcesses([ServerLaunch(config=config, variables={}, log_file=str(folder / "log"))])

    def start_again(_seconds: float, _server: int) -> None:
        servers.poll()

    ids, start = np.arange(1000), time.monotonic()
    servers.start(interrupts)
    try:
        workers = ServersConfig(addresses=(config.address,), token=config.token)
        settings = ConnectionSettings(reconnect_seconds=RESTART_SECONDS, on_wait=start_again)
        with ServerClient(workers, worker=0, worker_count=1, settings=settings) as client:
            table = client.open_table("doctor", TableSettings(dim=4, initial=Constant(value=0.0)))
            table.push(ids, np.ones(1000, np.int64), np.full((1000, 4), -2.0, np.float32), SgdSettings(lr=0.5))
            client.commit()
            table.pull(ids)
            served = time.monotonic() - start
            (row,) = servers.list_rows()
            os.kill(row.process_id, signal.SIGKILL)
            start = time.monotonic()
            rows = table.pull(ids)
            back = time.monotonic() - start
        if not (rows == 1.0).all():
            raise TableError(expected="rows of 1.0 after the kill", found=f"{rows.mean():g}", fix="check the memory")
    finally:
        servers.close()
    return f"a step after {format_seconds(served)}; after a kill it continued in {format_seconds(back)}"


if __name__ == "__main__":
    sys.exit(main())

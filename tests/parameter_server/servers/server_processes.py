"""Real servers, each a process, and clients of them."""

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rankless.config.servers import ServerConfig, ServersConfig, server_environment
from rankless.parameter_server.servers.client import ServerClient

ROOT = Path(__file__).parents[3]
PROGRAM = "rankless.parameter_server.servers.process"


class ServerProcess:
    """One server."""

    def __init__(self, config: ServerConfig) -> None:
        reading, writing = os.pipe()
        try:
            config = ServerConfig(
                **{**{f: getattr(config, f) for f in config.__struct_fields__}, "ready_descriptor": writing}
            )
            environment = server_environment(config) | {"PYTHONPATH": str(ROOT)}
            kept = (config.memory_descriptor, config.status_descriptor)
            self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # it lives as long as the process
            self.process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM],
                env=environment,
                pass_fds=[writing, *(descriptor for descriptor in kept if descriptor is not None)],
                stderr=self.log,
            )
        finally:
            os.close(writing)
        with os.fdopen(reading) as pipe:
            line = pipe.readline()
        self.is_durable = line.endswith(" durable\n")
        self.address = line.removeprefix("ready ").strip().removesuffix(" durable")

    def text(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(30)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.log.close()


class ServersOfRun:
    """All servers of a run."""

    def __init__(self, folder: Path, servers: int, workers: int, *, tcp: bool = False) -> None:
        self.token = secrets.token_hex(16)
        self.workers = workers
        self.processes = []
        run = secrets.token_hex(4)
        for index in range(servers):
            address = "tcp://127.0.0.1:0" if tcp else f"ipc://{folder}/{run}.{index}"
            config = ServerConfig(
                index=index, server_count=servers, worker_count=workers, address=address, token=self.token, run_id=run
            )
            self.processes.append(ServerProcess(config))
        self.config = ServersConfig(addresses=tuple(each.address for each in self.processes), token=self.token)

    def client(self, worker: int = 0, **options) -> ServerClient:
        return ServerClient(self.config, worker=worker, worker_count=self.workers, **options)

    def close(self) -> None:
        for process in self.processes:
            process.close()


@contextlib.contextmanager
def servers_of_run(folder: Path, servers: int = 1, workers: int = 1, **options) -> Iterator[ServersOfRun]:
    run = ServersOfRun(folder, servers, workers, **options)
    try:
        yield run
    finally:
        run.close()

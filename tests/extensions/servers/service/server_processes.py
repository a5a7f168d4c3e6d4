"""Real servers, each a process, and clients of them.

The processes are forked by one that has imported the program of a server: tests start hundreds of them.
"""

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from forked_server import ServerStart
from support.processes import fork_server_context

from rankless.extensions.servers.config import ServerConfig, ServersConfig
from rankless.extensions.servers.service.client import ServerClient


class ForkedProcess:
    """The process of a server, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, config: ServerConfig, descriptors: dict[str, int], log: int) -> None:
        start = ServerStart(config, descriptors, log)
        self._process = fork_server_context().Process(target=start, daemon=True)
        self._process.start()
        self.pid = self._process.pid
        self.terminate = self._process.terminate
        self.kill = self._process.kill

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        self._process.join(seconds)
        assert self._process.exitcode is not None, "the server has not ended in time"
        return self._process.exitcode


class ServerProcess:
    """One server."""

    def __init__(self, config: ServerConfig) -> None:
        reading, writing = os.pipe()
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # it lives as long as the process
        given = {"ready_descriptor": writing} | {
            name: descriptor
            for name in ("memory_descriptor", "status_descriptor")
            if (descriptor := getattr(config, name)) is not None
        }
        self.process = ForkedProcess(config, given, self.log.fileno())
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

    def __init__(
        self, folder: Path, servers: int, workers: int, *, tcp: bool = False, replicas: int = 0, **mode
    ) -> None:
        self.token = secrets.token_hex(16)
        self.workers = workers
        self.processes = []
        run = secrets.token_hex(4)
        for index in range(servers * (1 + replicas)):
            address = "tcp://127.0.0.1:0" if tcp else f"ipc://{folder}/{run}.{index}"
            config = ServerConfig(
                index=index,
                server_count=servers,
                worker_count=workers,
                address=address,
                token=self.token,
                run_id=run,
                replicas=replicas,
                **mode,
            )
            self.processes.append(ServerProcess(config))
        self.config = ServersConfig(
            addresses=tuple(each.address for each in self.processes),
            token=self.token,
            encrypted=bool(mode.get("encrypted")),
            replicas=replicas,
        )

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


class RestartedServer:
    """One server and its processes, one after the other."""

    def __init__(self, folder: Path, descriptor: int, workers: int = 1, **mode) -> None:
        self._address = f"ipc://{folder}/server"
        self._descriptor = descriptor
        self._workers = workers
        self._mode = mode
        self.incarnation = -1
        self.process: ServerProcess | None = None
        self._clients: list[ServerClient] = []

    def start(self) -> ServerProcess:
        self.incarnation += 1
        config = ServerConfig(
            index=0,
            server_count=1,
            worker_count=self._workers,
            address=self._address,
            token="secret",
            run_id="run",
            memory_descriptor=self._descriptor,
            incarnation=self.incarnation,
            **self._mode,
        )
        self.process = ServerProcess(config)
        return self.process

    def kill(self) -> None:
        self.process.process.kill()
        self.close()

    def restart(self) -> ServerProcess:
        """Kill the process, and start another one, to which the workers connect again."""
        self.process.close()
        return self.start()

    def close(self) -> None:
        """End the process, and drop all connections. The workers do not leave."""
        for client in self._clients:
            client.__exit__(ConnectionError)
        self._clients.clear()
        self.process.close()

    def client(self, worker: int = 0, **options) -> ServerClient:
        config = ServersConfig(addresses=(self.process.address,), token="secret")
        options = {"incarnation": self.incarnation} | options
        client = ServerClient(config, worker=worker, worker_count=self._workers, **options)
        self._clients.append(client)
        return client

import itertools

import pytest
from server_processes import ServersOfRun

from rankless.extensions.servers.service.server_connection import ConnectionSettings


def give_up(seconds: float, server: int) -> None:
    """End a test in which a worker waits for one that has failed."""
    assert seconds < 30, f"no answer of server {server}"


class SharedServers:
    """Servers that tests use one after the other, each with clients of a later incarnation and tables of its own."""

    def __init__(self, folder) -> None:
        self._folder = folder
        self._runs: dict[tuple[int, int], ServersOfRun] = {}
        self._numbers = itertools.count()

    def clients(self, servers: int, workers: int):
        key = (servers, workers)
        if key not in self._runs:
            self._runs[key] = ServersOfRun(self._folder, servers, workers)
        incarnation = next(self._numbers)
        settings = ConnectionSettings(on_wait=give_up)
        return [self._runs[key].client(worker, incarnation=incarnation, settings=settings) for worker in range(workers)]

    def new_name(self) -> str:
        return f"table {next(self._numbers)}"

    def close(self) -> None:
        for run in self._runs.values():
            run.close()


@pytest.fixture(scope="session")
def shared_servers(tmp_path_factory):
    shared = SharedServers(tmp_path_factory.mktemp("s"))
    yield shared
    shared.close()

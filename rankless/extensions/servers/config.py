"""The parameter servers of a run: what one server needs, and what workers need to reach all of them.

A server process has its configuration in one environment variable, which only this file reads and writes.

Note [copies of servers]: with `replicas=1` a run with S servers has 2 S server processes. All are numbered: server
S + k is the copy of server k. Both hold part k of each table. They are equal, and know nothing of each other.

The agent of a host and its workers share memory with a byte for each server, which says whether it is lost for good. A
worker that waits for a server looks there, so the agent never waits for a worker.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import msgspec

from rankless.errors import ConfigError
from rankless.records.encoding import encode_json
from rankless.records.shared_record import open_shared_file

SERVER = "RANKLESS_SERVER"
DEFAULT_STALENESS = 4
DEFAULT_GEO_STEPS = 10
DEFAULT_SERVER_RESTARTS = 10
"""How often servers that died are started again, all servers of a host together."""
CANNOT_CONTINUE = 3
"""The exit code of a server that cannot continue, also in a new process: its memory is damaged, say."""
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")

ServerMode = Literal["sync", "async", "bounded", "geo"]
"""When steps reach the tables.

- `sync`: one step per global batch, as on one device.
- `async`: one step per batch of one worker, when it arrives. Workers do not wait for each other.
- `bounded`: as `async`, but no worker is ahead of the slowest one by more than a given number of its batches.
- `geo`: workers step, and send to the servers what has changed after a given number of their batches.
"""
SERVER_MODES: tuple[str, ...] = get_args(ServerMode)


class RequestedServers(msgspec.Struct, frozen=True, kw_only=True):
    """The servers that a user requests."""

    count: int
    endpoints: tuple[str, ...] = ()
    """HOST:PORT of each server, or HOST for a free port.

    None: sockets in a private folder of the run on one host; on several hosts free ports, on each as many servers.
    """
    mode: ServerMode = "sync"
    staleness: int = DEFAULT_STALENESS
    """In the mode `bounded`, by how many of its batches a worker may be ahead of the slowest one."""
    geo_steps: int = DEFAULT_GEO_STEPS
    """In the mode `geo`, after how many of its batches a worker sends what has changed."""
    max_restarts: int = DEFAULT_SERVER_RESTARTS
    """How often servers that died are started again, all of a host together; 0 for never."""
    encrypted: bool = False
    """Whether workers and servers encrypt what they send each other."""
    replicas: int = 0
    """How many more servers hold the tables of each server: 0 or, in the mode `sync`, 1."""

    @property
    def process_count(self) -> int:
        """The number of servers with their copies."""
        return self.count * (1 + self.replicas)


NAME = "servers"
"""The name of the extension, and of its role."""
SERVER_ROLE = "server"
"""What one of its processes is called."""


def make_settings(servers: RequestedServers) -> dict[str, Any]:
    """Return what a `RunRequest` has of servers among its `options`."""
    settings: dict[str, Any] = msgspec.to_builtins(servers)
    return settings


def find_servers(settings: Mapping[str, Any]) -> RequestedServers:
    """Return the servers of `make_settings`."""
    return msgspec.convert(settings, RequestedServers)


def find_served(roles: Mapping[str, Any]) -> "ServersConfig | None":
    """Return the servers as a worker with these `roles` of its configuration sees them; None in a run without."""
    content = roles.get(NAME)
    return None if content is None else msgspec.convert(content, ServersConfig)


class ServersConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The servers of a run, as a worker sees them."""

    addresses: tuple[str, ...]
    """ZeroMQ's address of each server, in their order: `ipc:///path` on one host, `tcp://host:port` otherwise."""
    token: str
    """The run's secret, with which processes of the run prove that they belong to it."""
    mode: ServerMode = "sync"
    staleness: int = DEFAULT_STALENESS
    geo_steps: int = DEFAULT_GEO_STEPS
    encrypted: bool = False
    replicas: int = 0
    lost_descriptor: int | None = None
    """An inherited file in memory with a byte for each server, which is not 0 once it is lost; None without copies."""

    @property
    def part_count(self) -> int:
        """Into how many parts tables are divided: the number of servers without copies."""
        return len(self.addresses) // (1 + self.replicas)


def find_original(server: int, part_count: int) -> int | None:
    """Return the server of which a server is the copy; None if it is none. See Note [copies of servers]."""
    return server - part_count if server >= part_count else None


def find_partner(server: int, part_count: int) -> int:
    """Return the other server with the same tables, in a run with copies. See Note [copies of servers]."""
    return (server + part_count) % (2 * part_count)


def make_servers_config(requested: RequestedServers, addresses: Iterable[str], token: str) -> ServersConfig:
    """Return the requested servers as workers see them, with their addresses and the run's secret."""
    return ServersConfig(
        addresses=tuple(addresses),
        token=token,
        mode=requested.mode,
        staleness=requested.staleness,
        geo_steps=requested.geo_steps,
        encrypted=requested.encrypted,
        replicas=requested.replicas,
    )


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that one server process needs. It travels as JSON in one environment variable."""

    index: int
    """Its number among all servers. It holds the part `index % server_count` of tables."""
    server_count: int
    """Into how many parts tables are divided: the number of servers without copies."""
    replicas: int = 0
    worker_count: int
    address: str
    """The address on which it serves."""
    token: str
    run_id: str
    encrypted: bool = False
    mode: ServerMode = "sync"
    staleness: int = DEFAULT_STALENESS
    """In the mode `bounded`, by how many of its batches a worker may be ahead of the slowest one."""
    ready_descriptor: int | None = None
    """An inherited pipe to which it writes one line once it serves: `ready ADDRESS`, or `ready ADDRESS durable`.

    Durable: another process with the same memory can continue after this one has died.
    """
    memory_descriptor: int | None = None
    """An inherited file in memory, empty at first, that all processes of this server have; None if there is none."""
    status_descriptor: int | None = None
    """An inherited file in memory in which it publishes what it does; None if there is none."""
    incarnation: int = 0
    """How many processes of this server were started before this one."""


def format_server_address(host: str, port: int) -> str:
    """Return ZeroMQ's address of a server at a numeric address and a port."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def parse_server_address(address: str) -> tuple[str, int]:
    """Return the numeric address and the port of ZeroMQ's address `tcp://HOST:PORT`."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def server_environment(config: ServerConfig) -> dict[str, str]:
    """Return the environment of a server process, whose functions use one thread."""
    return os.environ | dict.fromkeys(_THREADS, "1") | {SERVER: encode_json(config).decode()}


def read_server_config() -> ServerConfig:
    """Return the configuration of this server process. Raises ConfigError if there is none."""
    try:
        return msgspec.json.decode(os.environ.get(SERVER, ""), type=ServerConfig)
    except msgspec.DecodeError as error:
        raise ConfigError(
            expected=f"the configuration of a parameter server in {SERVER}",
            found=str(error),
            fix="let the launcher start servers",
        ) from None


_LOST_NAME = "rankless-lost-servers"
_LOST = b"\1"


def open_lost_servers(count: int) -> int | None:
    """Return the descriptor of new memory for `count` servers, of which none is lost; None outside Linux."""
    return open_shared_file(_LOST_NAME, count)


def mark_lost(descriptor: int, server: int) -> None:
    """Note that a server, by its index, is lost for good."""
    os.pwrite(descriptor, _LOST, server)


def is_server_lost(descriptor: int | None, server: int) -> bool:
    """Return whether a server, by its index, is lost for good. Without a descriptor none is."""
    return descriptor is not None and os.pread(descriptor, 1, server) == _LOST

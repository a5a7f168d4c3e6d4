"""Options for parameter servers: `--servers`, `--workers`, `--server-mode` and `--server-restarts`."""

import argparse

from rankless.config.hosts import Endpoint, Host, read_endpoints
from rankless.config.server_hosts import find_worker_hosts
from rankless.config.servers import DEFAULT_SERVER_RESTARTS, SERVER_MODES, RequestedServers
from rankless.errors import ConfigError

_LIST = "127.0.0.1:6170,127.0.0.1:6171"


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to `parser`."""
    group = parser.add_argument_group("parameter servers")
    group.add_argument(
        "--servers",
        metavar="N|A:PORT,…",
        help="Parameter servers, which hold the rows of tables: their number, which several hosts share evenly, or "
        "their addresses, with a free port where none is given. Default: none, and workers hold the rows.",
    )
    group.add_argument(
        "--workers",
        dest="requested_workers",
        metavar="M|A[:PORT],…",
        help="Workers: their number, as -n, or one address for each, as --hosts if they are on several hosts. Their "
        "ports are not used.",
    )
    group.add_argument(
        "--server-mode",
        metavar="|".join(SERVER_MODES),
        default=SERVER_MODES[0],
        help="When steps reach the tables. sync: one step per global batch, as on one device. Default: sync.",
    )
    group.add_argument(
        "--server-restarts",
        type=int,
        metavar="N",
        default=DEFAULT_SERVER_RESTARTS,
        help="How often to start servers again that die and can go on with their tables, all servers of a host "
        f"together. 0: the first death ends the run. Default: {DEFAULT_SERVER_RESTARTS}.",
    )


def read_servers(arguments: argparse.Namespace) -> RequestedServers | None:
    """Return the servers that the options request, or None.

    Raises:
        ConfigError: For a number or an address that cannot be.
    """
    mode, text = arguments.server_mode, arguments.servers
    if mode not in SERVER_MODES:
        raise ConfigError(
            expected=f"--server-mode {', '.join(SERVER_MODES)}",
            found=mode,
            fix="omit it; async, geo and bounded: not yet",
        )
    restarts = arguments.server_restarts
    if restarts < 0:
        raise ConfigError(
            expected="--server-restarts as a number from 0 up", found=restarts, fix="give 0 to start no server again"
        )
    if text is None:
        return None
    count = _read_count("--servers", text, least=0)
    if count is not None:
        return RequestedServers(count=count, mode=mode, max_restarts=restarts) if count else None
    endpoints = _read_server_endpoints(text)
    return RequestedServers(
        count=len(endpoints), endpoints=tuple(map(str, endpoints)), mode=mode, max_restarts=restarts
    )


def read_workers(arguments: argparse.Namespace) -> tuple[int | None, tuple[Host, ...]]:
    """Return the number of workers that `-n` or `--workers` gives, or None, and the hosts of `--workers`.

    There are no such hosts if all workers are on this one, or if the option has no addresses.

    Raises:
        ConfigError: The two differ, or `--workers` is no number and no list of addresses.
    """
    text, given = arguments.requested_workers, arguments.workers
    if text is None:
        return (None if given is None else int(given)), ()
    count = _read_count("--workers", text, least=1)
    hosts: tuple[Host, ...] = ()
    if count is None:
        endpoints = read_endpoints("--workers", text, example="127.0.0.1,127.0.0.1", may_repeat=True)
        servers = arguments.servers
        is_list = servers is not None and _read_count("--servers", servers, least=0) is None
        hosts = find_worker_hosts("--workers", endpoints, _read_server_endpoints(servers) if is_list else ())
        count = len(endpoints)
    if given not in (None, count):
        raise ConfigError(
            expected="one number of workers",
            found=f"-n {given} and --workers {text}, which is {count}",
            fix="omit one of the two",
        )
    return count, hosts


def _read_server_endpoints(text: str) -> list[Endpoint]:
    return read_endpoints("--servers", text, example=_LIST)


def _read_count(option: str, text: str, *, least: int) -> int | None:
    """Return the number in `text`; None if it is a list of addresses."""
    try:
        count = int(text)
    except ValueError:
        return None
    if count < least:
        raise ConfigError(
            expected=f"{option} as a number from {least} up, or as a list of addresses",
            found=text,
            fix=f"correct {option}" + (", or omit it for a run without servers" if least == 0 else ""),
        )
    return count

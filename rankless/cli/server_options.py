"""Options for parameter servers: `--servers`, `--workers`, `--server-mode`, `--staleness` and `--server-restarts`."""

import argparse

from rankless.config.hosts import read_endpoints, require_this_host
from rankless.config.servers import DEFAULT_SERVER_RESTARTS, DEFAULT_STALENESS, SERVER_MODES, RequestedServers
from rankless.errors import ConfigError

_LIST = "127.0.0.1:6170,127.0.0.1:6171"


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to `parser`."""
    group = parser.add_argument_group("parameter servers")
    group.add_argument(
        "--servers",
        metavar="N|A:PORT,…",
        help="Parameter servers, which hold the rows of tables: their number, or their addresses on this host, with a "
        "free port where none is given. Default: none, and workers hold the rows.",
    )
    group.add_argument(
        "--workers",
        dest="requested_workers",
        metavar="M|A[:PORT],…",
        help="Workers: their number, as -n, or one address on this host for each. Their ports are not used.",
    )
    group.add_argument(
        "--server-mode",
        metavar="|".join(SERVER_MODES),
        default=SERVER_MODES[0],
        help="When steps reach the servers. sync: one step per global batch, as on one device. async: each worker "
        "takes whole batches of its own, with a step for each, and waits for no other one. bounded: as async, but no "
        "worker runs ahead of the slowest one by more than --staleness. Default: sync.",
    )
    group.add_argument(
        "--staleness",
        type=int,
        metavar="N",
        help="With --server-mode bounded: by how many of its batches a worker may be ahead of the slowest one. "
        f"Default: {DEFAULT_STALENESS}.",
    )
    group.add_argument(
        "--server-restarts",
        type=int,
        metavar="N",
        default=DEFAULT_SERVER_RESTARTS,
        help="How often to start servers again that die and can go on with their tables, all servers of the run "
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
            fix="give one of these; geo: not yet",
        )
    staleness = _read_staleness(arguments)
    restarts = arguments.server_restarts
    if restarts < 0:
        raise ConfigError(
            expected="--server-restarts as a number from 0 up", found=restarts, fix="give 0 to start no server again"
        )
    count = 0 if text is None else _read_count("--servers", text, least=0)
    if count is not None:
        if not count:
            _require_sync(mode)
            return None
        return RequestedServers(count=count, mode=mode, staleness=staleness, max_restarts=restarts)
    endpoints = read_endpoints("--servers", text, example=_LIST)
    require_this_host("--servers", endpoints)
    return RequestedServers(
        count=len(endpoints),
        endpoints=tuple(map(str, endpoints)),
        mode=mode,
        staleness=staleness,
        max_restarts=restarts,
    )


def read_worker_count(arguments: argparse.Namespace) -> int | None:
    """Return the number of workers that `-n` or `--workers` gives, or None.

    Raises:
        ConfigError: The two differ, or `--workers` is no number and no list of addresses of this host.
    """
    text, given = arguments.requested_workers, arguments.workers
    if text is None:
        return None if given is None else int(given)
    count = _read_count("--workers", text, least=1)
    if count is None:
        endpoints = read_endpoints("--workers", text, example="127.0.0.1,127.0.0.1", may_repeat=True)
        require_this_host("--workers", endpoints)
        count = len(endpoints)
    if given not in (None, count):
        raise ConfigError(
            expected="one number of workers",
            found=f"-n {given} and --workers {text}, which is {count}",
            fix="omit one of the two",
        )
    return count


def _require_sync(mode: str) -> None:
    if mode != "sync":
        raise ConfigError(
            expected=f"--servers with --server-mode {mode}, because servers hold the parameters then",
            found="no servers",
            fix="give --servers a number from 1 up",
        )


def _read_staleness(arguments: argparse.Namespace) -> int:
    """Return the staleness, which only the mode `bounded` has."""
    given, mode = arguments.staleness, arguments.server_mode
    if given is None:
        return DEFAULT_STALENESS
    if mode != "bounded" or given < 0:
        raise ConfigError(
            expected="--staleness as a number from 0 up, together with --server-mode bounded",
            found=f"--staleness {given} --server-mode {mode}",
            fix="give --server-mode bounded, or omit --staleness" if mode != "bounded" else "give 0 or more",
        )
    return int(given)


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

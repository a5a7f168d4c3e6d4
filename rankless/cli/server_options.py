"""Options for parameter servers: `--servers`, `--workers`, `--server-mode`, `--replicas` and others."""

import argparse
from typing import NamedTuple

from rankless.config.hosts import Endpoint, Host, is_here, read_endpoints
from rankless.config.server_hosts import find_worker_hosts, require_replicas
from rankless.config.servers import (
    DEFAULT_GEO_STEPS,
    DEFAULT_SERVER_RESTARTS,
    DEFAULT_STALENESS,
    SERVER_MODES,
    RequestedServers,
)
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
        "--heter-workers",
        metavar="K|A[:PORT],…",
        help="Heterogeneous workers besides: their number on each host, or one address for each, also on other hosts "
        "than --workers. They compute the dense part of models, which the script marks, on GPUs if there are any. The "
        "others read data and look rows up on the CPU. Default: none.",
    )
    group.add_argument(
        "--encrypt-servers",
        action="store_true",
        help="Workers and servers encrypt their traffic with ZeroMQ's CURVE. Default: they only authenticate.",
    )
    _add_mode_options(group)
    _add_loss_options(group)


def _add_mode_options(group: argparse._ArgumentGroup) -> None:
    """Add the options that say when steps reach the servers."""
    group.add_argument(
        "--server-mode",
        metavar="|".join(SERVER_MODES),
        default=SERVER_MODES[0],
        help="When steps reach the servers. sync: one step per global batch, as on one device. async: each worker "
        "takes whole batches of its own, with a step for each, and waits for no other one. bounded: as async, but no "
        "worker runs ahead of the slowest one by more than --staleness. geo: as async, but workers step themselves, "
        "and send their changes every --geo-steps batches. Default: sync.",
    )
    group.add_argument(
        "--staleness",
        type=int,
        metavar="N",
        help="With --server-mode bounded: how many batches a worker may be ahead of the slowest one. "
        f"Default: {DEFAULT_STALENESS}.",
    )
    group.add_argument(
        "--geo-steps",
        type=int,
        metavar="N",
        help="With --server-mode geo: after how many batches a worker sends its changes. "
        f"Default: {DEFAULT_GEO_STEPS}.",
    )


def _add_loss_options(group: "argparse._ArgumentGroup") -> None:
    """Add the options for servers, hosts and workers that are lost."""
    group.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        default=0,
        help="1 for a copy of each server, on another host if there are several. The run then tolerates the loss "
        "of one host of servers. Default: 0.",
    )
    group.add_argument(
        "--server-restarts",
        type=int,
        metavar="N",
        default=DEFAULT_SERVER_RESTARTS,
        help="How often the agent of a host restarts servers that die, all of the host together. "
        f"0: the first death ends the run. Default: {DEFAULT_SERVER_RESTARTS}.",
    )
    group.add_argument(
        "--lost-workers",
        type=int,
        metavar="N",
        help="With --server-mode sync: how many killed workers, across all hosts, the run tolerates. 0: the first "
        "killed worker ends the run. Default: all but one of each kind, if no worker has an accelerator.",
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
            fix="give one of these",
        )
    staleness = _read_option(arguments, "--staleness", of_mode="bounded", least=0, default=DEFAULT_STALENESS)
    geo_steps = _read_option(arguments, "--geo-steps", of_mode="geo", least=1, default=DEFAULT_GEO_STEPS)
    restarts = arguments.server_restarts
    if restarts < 0:
        raise ConfigError(
            expected="--server-restarts as a number from 0 up", found=restarts, fix="give 0 to start no server again"
        )
    count = 0 if text is None else _read_count("--servers", text, least=0)
    lost = _read_lost_workers(arguments, has_servers=count != 0)
    settings = {
        "mode": mode,
        "staleness": staleness,
        "geo_steps": geo_steps,
        "max_restarts": restarts,
        "lost_workers": lost,
        "encrypted": arguments.encrypt_servers,
        "replicas": arguments.replicas,
    }
    if count is not None:
        if not count:
            _require_no_server_options(arguments)
            return None
        servers = RequestedServers(count=count, **settings)
    else:
        endpoints = _read_server_endpoints(text)
        servers = RequestedServers(count=len(endpoints), endpoints=tuple(map(str, endpoints)), **settings)
    require_replicas(servers)
    return servers


def read_sync_servers(arguments: argparse.Namespace, command: str) -> RequestedServers | None:
    """Return the servers that the options of a command request, which takes those of the mode `sync` alone."""
    servers = read_servers(arguments)
    if servers is not None and servers.mode != "sync":
        raise ConfigError(
            expected="--server-mode sync, in which several workers make the steps of one",
            found=servers.mode,
            fix=f"{command} the script in the mode sync; the other modes are other trainings",
        )
    return servers


class RequestedWorkers(NamedTuple):
    """The workers that a command line names.

    Args:
        worker_count: The number of workers that are not heterogeneous, on each host or in the list; None if not given.
        heterogeneous: The number of those that are, on each host or in the list.
        hosts: The hosts of the lists; none if all workers are on this host, or if there are no lists.
    """

    worker_count: int | None
    heterogeneous: int
    hosts: tuple[Host, ...] = ()


def read_workers(arguments: argparse.Namespace) -> RequestedWorkers:
    """Return the workers that `-n`, `--workers` and `--heter-workers` name.

    Raises:
        ConfigError: An option is no number and no list of addresses, or two of them contradict each other.
    """
    text, given, heterogeneous_text = arguments.requested_workers, arguments.workers, arguments.heter_workers
    count, workers = _read_count_or_list("--workers", text, least=1)
    heterogeneous, others = _read_count_or_list("--heter-workers", heterogeneous_text, least=0)
    hosts: tuple[Host, ...] = ()
    if workers:
        servers = arguments.servers
        is_list = servers is not None and _read_count("--servers", servers, least=0) is None
        named_servers = _read_server_endpoints(servers) if is_list else ()
        hosts = find_worker_hosts("--workers", workers, named_servers, heterogeneous=others)
    _require_lists(arguments, hosts, others)
    if text is None:
        count = None if given is None else int(given)
    elif given not in (None, count):
        raise ConfigError(
            expected="one number of workers",
            found=f"-n {given} and --workers {text}, which is {count}",
            fix="omit one of the two",
        )
    return RequestedWorkers(count, heterogeneous or 0, hosts)


def _read_count_or_list(option: str, text: str | None, *, least: int) -> tuple[int | None, list[Endpoint]]:
    """Return the number of workers that an option gives, or None, and their addresses if it has a list of them."""
    count = None if text is None else _read_count(option, text, least=least)
    if text is None or count is not None:
        return count, []
    endpoints = read_endpoints(option, text, example="127.0.0.1,127.0.0.1", may_repeat=True)
    return len(endpoints), endpoints


def _require_lists(arguments: argparse.Namespace, hosts: tuple[Host, ...], heterogeneous: list[Endpoint]) -> None:
    """Raise `ConfigError` unless heterogeneous workers have the form that the other workers have on several hosts."""
    text, workers = arguments.heter_workers, arguments.requested_workers
    names_hosts = (arguments.hosts, arguments.hostfile, arguments.host_rank, arguments.master, arguments.host_count)
    if heterogeneous and any(each is not None for each in names_hosts):
        raise ConfigError(
            expected="--heter-workers as a number, that of each host, where --workers does not list the hosts",
            found=text,
            fix="give the number, or list the hosts by --workers A,A,B --heter-workers A,B instead",
        )
    elsewhere = [each for each in heterogeneous if not hosts and not is_here(each.host)]
    if elsewhere or (hosts and text is not None and not heterogeneous and int(text) > 0):
        raise ConfigError(
            expected="on several hosts --workers and --heter-workers with one address for each worker",
            found=("" if workers is None else f"--workers {workers} ") + f"--heter-workers {text}",
            fix="list both: --workers A,A,B --heter-workers C,C",
        )


def _read_server_endpoints(text: str) -> list[Endpoint]:
    return read_endpoints("--servers", text, example=_LIST)


def _require_no_server_options(arguments: argparse.Namespace) -> None:
    """Raise `ConfigError` if there is an option that needs servers."""
    mode = arguments.server_mode
    needing = {
        f"--server-mode {mode}": (mode != SERVER_MODES[0], "because servers hold the parameters then"),
        "--encrypt-servers": (arguments.encrypt_servers, "which is about messages to servers"),
        f"--replicas {arguments.replicas}": (arguments.replicas != 0, "because replicas are copies of servers"),
    }
    for option, (is_given, reason) in needing.items():
        if is_given:
            raise ConfigError(
                expected=f"--servers with {option}, {reason}",
                found="no servers",
                fix=f"give --servers a number from 1 up, or omit {option}",
            )


def _read_lost_workers(arguments: argparse.Namespace, *, has_servers: bool) -> int | None:
    """Return without how many killed workers the others go on, or None without the option."""
    lost: int | None = arguments.lost_workers
    if lost is not None and (lost < 0 or (lost > 0 and (not has_servers or arguments.server_mode != "sync"))):
        raise ConfigError(
            expected="--lost-workers as a number from 0 up, together with --servers and --server-mode sync",
            found=f"--lost-workers {lost}" + ("" if has_servers else " without servers"),
            fix="give --servers a number from 1 up, or omit --lost-workers",
        )
    return lost


def _read_option(arguments: argparse.Namespace, option: str, *, of_mode: str, least: int, default: int) -> int:
    """Return the number of an option that one mode has."""
    given, mode = getattr(arguments, option.removeprefix("--").replace("-", "_")), arguments.server_mode
    if given is None:
        return default
    if mode != of_mode or given < least:
        raise ConfigError(
            expected=f"{option} as a number from {least} up, together with --server-mode {of_mode}",
            found=f"{option} {given} --server-mode {mode}",
            fix=f"give --server-mode {of_mode}, or omit {option}" if mode != of_mode else f"give {least} or more",
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
